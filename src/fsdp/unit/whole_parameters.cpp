#include "fsdp/unit/whole_parameters.h"

#include <torch/torch.h>

#include <algorithm>

#include "fsdp/unit/whole_copies.h"

namespace tessera::detail {

at::Tensor WholeParameters::exchange(const at::Tensor& mine) const {
  return store_.channel().exchange(mine);
}

at::Tensor WholeParameters::gather(const at::Tensor& memory) const {
  return gather_of(store_.shard(), memory);
}

at::Tensor WholeParameters::gather_of(const at::Tensor& mine, const at::Tensor& memory) const {
  const auto all = exchange(mine);
  const auto& layout = store_.layout();
  const auto count = layout.gathered_elements;
  const bool fits =
      memory.defined() && memory.numel() >= count && memory.options().type_equal(mine.options());
  if (layout.is_end_to_end && !fits) return all;
  auto whole = fits ? memory.narrow(0, 0, count) : at::empty({count}, mine.options());
  copy_runs(layout, all, layout, whole);
  return whole;
}

at::Tensor WholeParameters::view(const at::Tensor& whole, std::size_t param) const {
  const auto& place = store_.layout().params[param];
  return whole.narrow(0, place.gathered_offset, place.elements).view(place.shape).detach();
}

at::Tensor WholeParameters::sum(const at::Tensor& mine) const {
  return exchange(mine).view({-1, mine.numel()}).sum(0);
}

void WholeParameters::keep_own(const at::Tensor& whole, const at::Tensor& to) const {
  const auto& layout = store_.layout();
  for (const auto& run : layout.runs[store_.rank()]) {
    const auto from = layout.params[run.param].gathered_offset + run.global;
    to.narrow(0, run.local, run.count).copy_(whole.narrow(0, from, run.count));
  }
}

void WholeParameters::take_own(std::size_t param, const at::Tensor& whole,
                               const at::Tensor& to) const {
  const auto flat = whole.detach().contiguous().view({-1});
  const auto& runs = store_.layout().runs[store_.rank()];
  for (const auto& run : std::ranges::equal_range(runs, param, {}, &ParamRun::param))
    to.narrow(0, run.local, run.count).copy_(flat.narrow(0, run.global, run.count));
}

}  // namespace tessera::detail
