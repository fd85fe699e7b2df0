// Counts every allocation of the program that it is linked into.
#pragma once

#include <cstdint>
#include <functional>

namespace tessera {

// The most bytes that the heap has during `work` above what it has before.
std::int64_t heap_height_of(const std::function<void()>& work);

}  // namespace tessera
