// The memory of tensors on a GPU, as the core sees it.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <memory>

#include "tessera/io.h"

namespace tessera {

// All bytes of the storage of `tensor`, which it keeps alive. Copies are queued on the stream that
// is current for the calling thread and the tensor's device now, whichever thread starts them: they
// come after the kernels that the caller has queued there, and before those that follow. Windows
// are page-locked for CUDA devices. Copies of a tensor on the CPU are complete when they are
// started.
[[nodiscard]] std::shared_ptr<DeviceMemory> device_memory_of(const at::Tensor& tensor);

// A tensor of one dimension over the bytes of what device_memory_of returned, from `at` on; it
// keeps them alive.
[[nodiscard]] at::Tensor tensor_over(const std::shared_ptr<DeviceMemory>& memory, std::uint64_t at,
                                     at::IntArrayRef sizes, at::IntArrayRef strides,
                                     at::ScalarType type);

// How memory of the host is page-locked for devices of a type. Each returns 0 if it has worked.
struct PageLock {
  int (*lock)(void* bytes, std::size_t size, unsigned flags) = nullptr;
  int (*unlock)(void* bytes) = nullptr;
  // Takes back the error that the last call left for the next kernel's check.
  int (*forget_error)() = nullptr;
};

// Those of CUDA are looked up in the program, which has no CUDA at build time. For backends outside
// of libtorch: what locks pages for one.
void set_page_lock(const PageLock& functions);

}  // namespace tessera
