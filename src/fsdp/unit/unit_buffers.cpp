#include "fsdp/unit/unit_buffers.h"

#include <torch/torch.h>

#include "torch/device.h"

namespace tessera::detail {

at::ScalarType UnitBuffers::wanted_type(const at::Tensor& buffer) const {
  return dtype_ && buffer.is_floating_point() ? *dtype_ : buffer.scalar_type();
}

void UnitBuffers::place() {
  for (const auto& buffer : all_) {
    const auto own = buffer.scalar_type();
    const auto wanted = wanted_type(buffer);
    if (wanted != own) cast_.emplace_back(buffer, own);
    if (wanted != own || buffer.device() != device_)
      replace_data(buffer, buffer.to(device_, wanted));
  }
}

void UnitBuffers::use_own_dtype(bool own) {
  if (std::exchange(has_own_dtype_, own) == own) return;
  for (const auto& [buffer, type] : cast_) buffer.set_data(buffer.to(own ? type : *dtype_));
}

}  // namespace tessera::detail
