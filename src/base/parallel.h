// Work on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace tessera {

// Calls work(i) for every i in [0, count) on up to `threads` threads, the calling one among them,
// and returns when all calls have. Indices are handed out in ascending order. After a call throws
// no new index is handed out; the exception of the lowest index is rethrown.
void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& work);

}  // namespace tessera
