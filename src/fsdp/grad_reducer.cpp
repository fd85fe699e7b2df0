#include "fsdp/grad_reducer.h"

#include <torch/torch.h>

#include <cmath>

#include "tessera/error.h"

namespace tessera::detail {
namespace {

// Numbers stay small enough for their sums to be exact.
constexpr int kIdRange = 1024;

}  // namespace

GradScale GradScale::make(double divisor, at::ScalarType reduced_in) {
  const bool safe =
      reduced_in == at::kFloat || reduced_in == at::kDouble || reduced_in == at::kBFloat16;
  if (safe) return {1, divisor};
  double before = 1;
  while (std::fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
  return {before, divisor / before};
}

void require_reducible(const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided)
    throw Error(ErrorCode::unsupported, "sparse gradients are not reduced");
  if (gradient.requires_grad()) {
    throw Error(ErrorCode::unsupported,
                "FSDP only works with gradients that don't require gradients: backward was called "
                "with create_graph");
  }
}

at::Tensor Trailer::make(const std::vector<at::Tensor>& gradients, int id,
                         const at::TensorOptions& options) {
  auto numbers = at::empty({size(gradients.size())}, at::kFloat);
  auto* number = numbers.mutable_data_ptr<float>();
  for (const auto& gradient : gradients) *number++ = gradient.defined() ? 1.0F : 0.0F;
  *number = static_cast<float>(id % kIdRange);
  return numbers.to(options);
}

std::vector<bool> Trailer::read(const at::Tensor& sum, std::size_t parameters, int id, int ranks) {
  const auto count = size(parameters);
  const auto trailer =
      sum.narrow(0, sum.numel() - count, count).to(at::kCPU, at::kDouble).contiguous();
  const auto* numbers = trailer.const_data_ptr<double>();
  // Sums in shorter types are rounded.
  const bool exact = sum.scalar_type() == at::kFloat || sum.scalar_type() == at::kDouble;
  if (exact && std::lround(numbers[count - 1]) != static_cast<long>(ranks) * (id % kIdRange)) {
    throw Error(
        ErrorCode::mismatch,
        "the ranks reduced different units at the same time; their forwards must call the same "
        "modules in the same order");
  }
  std::vector<bool> present;
  for (std::size_t i = 0; i < parameters; ++i) present.push_back(numbers[i] != 0);
  return present;
}

}  // namespace tessera::detail
