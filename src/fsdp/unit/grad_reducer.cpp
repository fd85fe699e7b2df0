#include "fsdp/unit/grad_reducer.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "base/text.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"
#include "torch/device.h"

namespace tessera::detail {
namespace {

// Whether all ranks gave `number`. The sums say of each bit how many have it set and how many have
// not: nobody may have said the opposite. Sums of nothing but zeros are 0 and no others are, in
// every type and order, where those of ones soon stay what they are: 256 + 1 is 256 in bfloat16.
bool all_gave(std::uint32_t number, const double* sums) {
  for (int bit = 0; bit < Trailer::kBits; ++bit) {
    const bool is_set = ((number >> bit) & 1U) != 0;
    if (sums[2 * bit + (is_set ? 1 : 0)] != 0) return false;
  }
  return true;
}

[[noreturn]] void throw_mismatch(std::string text) {
  if (const auto where = whereabouts(); !where.empty()) text += "; this rank is at " + where;
  throw Error(ErrorCode::mismatch, std::move(text));
}

// `sums`: of the bits of these numbers, one after the other.
void require_same_reduced(const Reduced& what, const double* sums) {
  struct Same {
    std::uint32_t number;
    const char* otherwise;
  };
  const std::array all{
      Same{what.id,
           "the ranks reduced different units at the same time; their forwards must call the same "
           "modules in the same order"},
      // Nothing else tells that a rank is behind if parameters are whole.
      Same{what.pass,
           "the ranks reduced gradients of different passes of the model: one of them left out a "
           "backward or a step (a `continue` where the loss is NaN), called the model with "
           "gradients more often than the others, or called abandon_step alone"},
      Same{what.trained,
           "the ranks require gradients of different parameters of this unit: freeze and thaw the "
           "same ones on every rank"},
  };
  for (const auto& [number, otherwise] : all) {
    if (!all_gave(number, sums)) throw_mismatch(otherwise);
    sums += 2 * Trailer::kBits;
  }
}

at::Tensor numbers_of(const std::vector<at::Tensor>& gradients, const Reduced& what) {
  auto numbers = at::empty({Trailer::size(gradients.size())}, at::kFloat);
  auto* number = numbers.mutable_data_ptr<float>();
  for (const auto& gradient : gradients) *number++ = gradient.defined() ? 1.0F : 0.0F;
  for (const auto value : {what.id, what.pass, what.trained}) {
    for (int bit = 0; bit < Trailer::kBits; ++bit) {
      const bool is_set = ((value >> bit) & 1U) != 0;
      *number++ = is_set ? 1.0F : 0.0F;
      *number++ = is_set ? 0.0F : 1.0F;
    }
  }
  return numbers;
}

// The last elements of a sum; real ones.
at::Tensor trailer_of(const at::Tensor& sum, std::size_t parameters) {
  const auto count = Trailer::size(parameters);
  const auto end = sum.narrow(0, sum.numel() - count, count);
  return end.is_complex() ? at::real(end) : end;
}

// To page-locked memory, without a wait.
at::Tensor start_copy_out(const at::Tensor& there) {
  const auto here = at::empty(there.sizes(), there.options().device(at::kCPU).pinned_memory(true));
  return here.copy_(there, /*non_blocking=*/true);
}

// `sums`: of a trailer, on the host.
std::vector<bool> read_sums(const at::Tensor& sums, std::size_t parameters, const Reduced& what) {
  const auto trailer = sums.to(at::kDouble).contiguous();
  const auto* numbers = trailer.const_data_ptr<double>();
  require_same_reduced(what, numbers + parameters);
  std::vector<bool> present;
  for (std::size_t i = 0; i < parameters; ++i) present.push_back(numbers[i] != 0);
  return present;
}

}  // namespace

std::uint32_t digest_of_trained(const std::vector<bool>& trained) {
  std::uint32_t digest = 2166136261U;  // FNV-1a
  for (const bool one : trained) {
    digest ^= one ? 1U : 2U;
    digest *= 16777619U;
  }
  return digest ^ digest >> Trailer::kBits;
}

std::uint32_t digest_of_trained(const std::vector<UnitParam>& params) {
  std::vector<bool> trained;
  for (const auto& param : params) trained.push_back(param.full.requires_grad());
  return digest_of_trained(trained);
}

GradScale GradScale::make(double divisor, at::ScalarType reduced_in) {
  if (is_one_of(reduced_in, at::kFloat, at::kDouble, at::kBFloat16)) return {1, divisor};
  double before = 1;
  while (std::fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
  return {before, divisor / before};
}

GradReducer::GradReducer(double divisor, at::ScalarType dtype)
    : dtype_(dtype), wanted_{.divisor = divisor} {
  adopt_rules();
}

void GradReducer::adopt_rules() {
  scale_ = GradScale::make(wanted_.divisor, dtype_);
  hook_ = wanted_.hook;
}

bool are_all_defined(const std::vector<at::Tensor>& gradients) {
  return std::ranges::all_of(gradients, [](const auto& one) { return one.defined(); });
}

void require_without_graph(const at::Tensor& gradient) {
  if (!gradient.requires_grad()) return;
  throw Error(ErrorCode::unsupported,
              "FSDP only works with gradients that don't require gradients: backward was called "
              "with create_graph");
}

void require_reducible(const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided) {
    throw Error(ErrorCode::unsupported,
                "a sparse gradient is not reduced: only replicate and DistributedDataParallel take "
                "one, of torch::nn::Embedding and EmbeddingBag that have sparse(true) when they "
                "become a unit; elsewhere it has to be dense");
  }
  require_without_graph(gradient);
}

void GradReducer::look(Look how) {
  while (!late_.empty()) {
    const auto& [trailer, is_old] = late_.front();
    if (!trailer.is_here()) {
      if (how == Look::now || (how == Look::pass && !is_old)) break;
      trailer.wait();
    }
    const auto done = std::move(late_.front());
    late_.pop_front();
    done.trailer.require();
  }
  if (how != Look::pass) return;
  for (auto& one : late_) one.is_old = true;
}

std::vector<bool> GradReducer::read_trailer(const at::Tensor& sum, std::size_t parameters,
                                            const Reduced& what, bool has_all) {
  if (!has_all || !is_accelerator(sum.device())) return Trailer::read(sum, parameters, what);
  late_.push_back({LateTrailer(sum, parameters, what)});
  return std::vector<bool>(parameters, true);
}

at::Tensor Trailer::make(const std::vector<at::Tensor>& gradients, const Reduced& what,
                         const at::TensorOptions& options) {
  if (is_accelerator(options.device())) return make_rows(gradients, what, options, 1).view({-1});
  return numbers_of(gradients, what).to(options);
}

at::Tensor Trailer::make_rows(const std::vector<at::Tensor>& gradients, const Reduced& what,
                              const at::TensorOptions& options, int ranks) {
  const auto numbers = numbers_of(gradients, what);
  auto rows = at::empty({ranks, numbers.numel()}, options.device(at::kCPU).pinned_memory(true));
  rows.copy_(numbers);
  return rows.to(options.device(), /*non_blocking=*/true);
}

std::vector<bool> Trailer::read(const at::Tensor& sum, std::size_t parameters,
                                const Reduced& what) {
  return read_sums(trailer_of(sum, parameters).to(at::kCPU), parameters, what);
}

LateTrailer::LateTrailer(const at::Tensor& sum, std::size_t parameters, const Reduced& what)
    : parameters_(parameters),
      what_(what),
      numbers_(start_copy_out(trailer_of(sum, parameters))),
      event_(mark_current(sum.device())) {}

void LateTrailer::require() const {
  static_cast<void>(read_sums(numbers_, parameters_, what_));
}

}  // namespace tessera::detail
