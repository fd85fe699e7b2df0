// Which buffers are no part of their module's state (tessera/buffers.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::detail {

// `name`: as its module calls it.
void set_persistent(const at::Tensor& buffer, const std::string& name, bool persistent);
[[nodiscard]] bool is_persistent(const at::Tensor& buffer, const std::string& name);
// Of how many buffers it is known that they are not. Those that have died count until the number
// of entries has doubled.
[[nodiscard]] std::size_t not_persistent_buffers();

}  // namespace tessera::detail
