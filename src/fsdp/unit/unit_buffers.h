// The buffers that are no part of their module's state (tessera/unit_controls.h).
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/types.h>

namespace tessera::detail {

// `name`: as its module calls it.
void set_persistent(const at::Tensor& buffer, const std::string& name, bool persistent);
[[nodiscard]] bool is_persistent(const at::Tensor& buffer, const std::string& name);
// The number of buffers that are known to be none of it. Those that have died count until the
// number of entries has doubled.
[[nodiscard]] std::size_t not_persistent_buffers();

// UnitBuffers: the buffers of a unit's modules, which stay whole on every rank: where they are and
// which dtype they have.

class UnitBuffers {
 public:
  // Floating-point buffers get `dtype`, when there is one.
  UnitBuffers(torch::Device device, std::optional<at::ScalarType> dtype)
      : device_(device), dtype_(dtype) {}

  void take(std::vector<at::Tensor> buffers) { all_ = std::move(buffers); }
  // Moves them to the device and casts them.
  void place();
  // Gives those that were cast their own dtype back, or again the one asked for.
  void use_own_dtype(bool own);
  // Those that were cast, each with the dtype that it had before.
  [[nodiscard]] const std::vector<std::pair<at::Tensor, at::ScalarType>>& cast() const noexcept {
    return cast_;
  }

 private:
  [[nodiscard]] at::ScalarType wanted_type(const at::Tensor& buffer) const;

  torch::Device device_;
  std::optional<at::ScalarType> dtype_;
  std::vector<at::Tensor> all_;
  std::vector<std::pair<at::Tensor, at::ScalarType>> cast_;
  bool has_own_dtype_ = false;  // those that were cast, for a while
};

}  // namespace tessera::detail
