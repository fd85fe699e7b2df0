#include "torch/rank_local.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

void refuse_part(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  throw Error(ErrorCode::unsupported,
              op.schema().name() +
                  " of a sharded gradient would be that of this rank's part alone. Optimizers that "
                  "are not elementwise (torch::optim::LBFGS) do not work on sharded parameters; "
                  "instead of torch::nn::utils::clip_grad_norm_ call tessera::clip_grad_norm. "
                  "Where the part alone is wanted, take its clone()");
}

at::Tensor abs_of_part(const at::Tensor& self) {
  at::Tensor result;
  {
    const TakesParts within;
    result = self.abs();
  }
  return result.requires_grad() ? result : as_rank_local(result);
}

// Once a process.
void register_kernels() {
  static torch::Library others(torch::Library::IMPL, "_", kRankLocalKey, __FILE__, __LINE__);
  static torch::Library refused(torch::Library::IMPL, "aten", kRankLocalKey, __FILE__, __LINE__);
  static const bool done = [] {
    others.fallback(torch::CppFunction::makeFallthrough());
    for (const auto* name :
         {"cat", "dot", "vdot", "linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dtype",
          "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "_foreach_norm.Scalar", "max"})
      refused.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_part>());
    refused.impl("abs", &abs_of_part);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

at::Tensor as_rank_local(const at::Tensor& tensor) {
  register_kernels();
  const auto plain = tensor.detach();
  auto part = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(plain.storage()),
      plain.unsafeGetTensorImpl()->key_set().add(kRankLocalKey), plain.dtype());
  part.unsafeGetTensorImpl()->set_sizes_and_strides(plain.sizes(), plain.strides(),
                                                    plain.storage_offset());
  return part;
}

}  // namespace tessera
