// A few freed blocks of memory, kept for the next unit of the same size: on the CPU fresh memory
// costs a page fault every 4 KiB, which would dominate gathering.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace tessera::detail {

class StoragePool {
 public:
  // An array like `array`, which has no memory of its own, with memory.
  [[nodiscard]] at::Tensor make_like(const at::Tensor& array);
  // Takes the memory of `storage`. Its nominal size stays: views of it can still be made, so that
  // whoever uses a freed parameter gets as far as the access that explains what is wrong.
  void take(c10::StorageImpl& storage);

 private:
  // Of a storage that was taken, for one like `model`; null: there is none.
  [[nodiscard]] c10::DataPtr reuse(const c10::StorageImpl& model);

  static constexpr std::size_t kKept = 2;
  std::vector<std::pair<std::size_t, c10::DataPtr>> blocks_;
};

}  // namespace tessera::detail
