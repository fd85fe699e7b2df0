// activation_checkpoint: computes a part of a model without keeping what its backward needs, and
// computes the part again in backward. This saves memory of activations and costs one more forward.
//
//   for (auto& block : blocks) x = activation_checkpoint(block, x);
//
// The part is computed again with the same inputs, the same state of the random generators and the
// same autocast as the first time. It must then do the same; a result of another number of tensors
// or of other shapes is `mismatch`. What it changes elsewhere is changed twice (running statistics
// of BatchNorm, for one). It works with sharded modules: their units are
// gathered for the second forward too.
//
// Its backward is one of its own, which adds to the grad() of all parameters that the part uses.
// torch::autograd::grad, backward with `inputs` and backward with create_graph would get something
// else than they ask for, so they are `unsupported` where they go through the part (as in PyTorch
// with use_reentrant=True).
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/detail/call.h"
#include "tessera/detail/tensors_of.h"

namespace [[gnu::visibility("default")]] tessera {

namespace detail {

// Computes with these tensors as inputs, and returns the tensors of the results.
using Recompute = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
[[nodiscard]] std::vector<at::Tensor> run_checkpointed(Recompute compute,
                                                       std::vector<at::Tensor> inputs);

template <typename Callee, typename... Arguments>
decltype(auto) call_or_invoke(Callee& callee, Arguments&... arguments) {
  if constexpr (std::is_invocable_v<Callee&, Arguments&...>) {
    return callee(arguments...);
  } else {
    return call_module(impl_of(callee), arguments...);
  }
}

}  // namespace detail

// Calls callee(arguments...), where `callee` is a function object, a holder or a shared_ptr of a
// module. The callee and copies of the arguments are kept until the backward. Tensors in arguments
// and results are found as in calls of sharded modules. Arguments without tensors are passed on as
// they are.
template <typename Callee, typename... Arguments>
auto activation_checkpoint(Callee callee, Arguments... arguments) {
  using Result = std::decay_t<decltype(detail::call_or_invoke(callee, arguments...))>;
  static_assert(TensorsOf<Result>::known && TensorsOf<Result>::any,
                "checkpoint has to find the tensors of the result: specialize tessera::TensorsOf");
  auto carried = std::make_shared<std::tuple<Arguments...>>(std::move(arguments)...);
  std::vector<at::Tensor> inputs;
  std::apply(
      [&](auto&... argument) {
        std::vector<at::Tensor*> found;
        (detail::collect_tensors(argument, found), ...);
        for (auto* tensor : found) inputs.push_back(std::exchange(*tensor, {}));
      },
      *carried);
  auto first = std::make_shared<std::optional<Result>>();
  auto compute = [callee = std::move(callee), carried,
                  first](const std::vector<at::Tensor>& given) mutable {
    // The arguments hold the tensors only during the computation.
    auto filled = *carried;
    auto result = std::apply(
        [&](auto&... argument) {
          std::vector<at::Tensor*> places;
          (detail::collect_tensors(argument, places), ...);
          for (std::size_t i = 0; i < places.size(); ++i) *places[i] = given[i];
          return detail::call_or_invoke(callee, argument...);
        },
        filled);
    std::vector<at::Tensor*> places;
    detail::collect_tensors(result, places);
    std::vector<at::Tensor> tensors;
    for (auto* tensor : places) tensors.push_back(std::exchange(*tensor, {}));
    if (first) *first = std::move(result);
    first.reset();
    return tensors;
  };
  auto outputs = detail::run_checkpointed(std::move(compute), std::move(inputs));
  Result result = std::move(**first);
  std::vector<at::Tensor*> places;
  detail::collect_tensors(result, places);
  for (std::size_t i = 0; i < places.size(); ++i) *places[i] = std::move(outputs[i]);
  return result;
}

}  // namespace tessera
