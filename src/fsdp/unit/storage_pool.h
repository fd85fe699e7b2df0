// A few freed blocks of memory, kept for the next unit of the same size: on the CPU fresh memory
// costs a page fault every 4 KiB, which would dominate gathering. On a device a block goes from the
// stream that computes to the one that gathers, which waits for the kernels that used it and for no
// others; from the allocator it would have to wait for all that was queued.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "torch/side_stream.h"

namespace tessera::detail {

class StoragePool {
 public:
  // An array like `array`, which has no memory of its own, with memory. On a device it is for the
  // stream of gathers, or for the current one.
  [[nodiscard]] at::Tensor make_like(const at::Tensor& array);
  // Takes the memory of `storage`. Its nominal size stays: views of it can still be made, so that
  // whoever uses a freed parameter gets as far as the access that explains what is wrong.
  void take(c10::StorageImpl& storage);

  // The stream of gathers to `device`, the same one for all of a pool.
  [[nodiscard]] const SideStream& gathers(at::Device device);
  // Shards may have changed: gathers see what the current stream has done to them.
  void follow_current();
  // The stream that sums over copies begin on, likewise.
  [[nodiscard]] const SideStream& sums(at::Device device);

 private:
  struct Block {
    std::size_t bytes;
    c10::DataPtr memory;
    std::optional<c10::Event> last_use;  // on a device, by the stream that computes
  };
  // Of a storage that was taken, for one like `model`; null: there is none.
  [[nodiscard]] c10::DataPtr reuse(const c10::StorageImpl& model);

  static constexpr std::size_t kKept = 2;
  std::vector<Block> blocks_;
  std::optional<SideStream> gathers_, sums_;
};

}  // namespace tessera::detail
