// Gradients of which a rank holds only its part refuse what would take the part for the whole.
//
// An elementwise optimizer may work on parts; a norm, a dot product or one vector of all gradients
// may not: torch::nn::utils::clip_grad_norm_ would clip every rank by another number, and
// torch::optim::LBFGS go another way on each. libtorch has no hook for that but its dispatcher, so
// such tensors carry a dispatch key of their own. It has kernels for the operators below, which
// throw `unsupported`; all others fall through it and cost nothing more.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

namespace tessera {

// No backend and no functionality of libtorch's has it.
inline constexpr auto kRankLocalKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// `tensor` over the same memory, without history, as a part. Refused are cat, norms, dot products,
// and the maximum of all elements, also of its abs(). Views and detach() are parts too; results of
// operators, clone() among them, are not.
[[nodiscard]] at::Tensor as_rank_local(const at::Tensor& tensor);

// Within its life parts are like other tensors, for this thread.
class TakesParts {
  c10::impl::ExcludeDispatchKeyGuard guard_{kRankLocalKey};
};

}  // namespace tessera
