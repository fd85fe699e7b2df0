#include "tessera/collectives.h"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "base/copies.h"
#include "base/process.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/compat.h"
#include "torch/mesh_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::MeshState;
using detail::state_of;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void require_dense(const char* operation, const torch::Tensor& tensor) {
  require_defined(operation, tensor);
  if (tensor.layout() != at::kStrided)
    throw Error(ErrorCode::unsupported, "a tensor that is not dense").while_doing(operation);
}

// The text that has to be alike on all ranks: "all_gather of Float [2, 3]".
std::string call_of(const char* function, const torch::Tensor& tensor) {
  return function + std::string(" of ") + c10::toString(tensor.scalar_type()) + " " +
         to_string(tensor.sizes().vec());
}

// The bytes of a tensor of any type: transports know fewer of them.
torch::Tensor bytes_of_dense(const torch::Tensor& tensor) {
  return plain(tensor).contiguous().reshape({-1}).view(torch::kUInt8);
}

// Compares `call` over the ranks; then does what `work` begins.
template <typename Work>
void run_collective(MeshState& state, const std::string& call, const Work& work) {
  require_own_connections(state.made);
  const Purpose purpose(call);
  communicate(call, [&] {
    require_same_call(state.names.get(), "a collective");
    work(*state.process_group)->wait();
  });
}

// [ranks, ...]
torch::Tensor gathered(const torch::Tensor& tensor, MeshState& state) {
  if (!state.process_group) return tensor.clone(at::MemoryFormat::Contiguous).unsqueeze(0);
  auto shape = tensor.sizes().vec();
  shape.insert(shape.begin(), state.size);
  auto all = torch::empty(shape, tensor.options().requires_grad(false));
  auto in = bytes_of_dense(tensor), out = bytes_of_dense(all);
  run_collective(state, call_of("all_gather", tensor),
                 [&](auto& group) { return compat::all_gather(group, out, in); });
  return all;
}

// The sum over the ranks of what each has in this one's place of [ranks, ...].
torch::Tensor scattered_sum(const torch::Tensor& tensor, MeshState& state) {
  if (!state.process_group) return tensor[0].clone();
  // Transports add up no complex numbers; their parts add up alike.
  const auto numbers = plain(tensor).contiguous();
  auto in = numbers.is_complex() ? torch::view_as_real(numbers) : numbers;
  auto sum = torch::empty_like(numbers[0], at::MemoryFormat::Contiguous);
  auto out = (sum.is_complex() ? torch::view_as_real(sum) : sum).reshape({-1});
  in = in.reshape({-1});
  run_collective(state, call_of("the backward of all_gather", tensor),
                 [&](auto& group) { return compat::reduce_scatter(group, out, in); });
  return sum;
}

// Each is the backward of the other.
struct AllGather : torch::autograd::Function<AllGather> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& tensor,
                               const Mesh& mesh);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};
struct SumOfParts : torch::autograd::Function<SumOfParts> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& tensor,
                               const Mesh& mesh);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

torch::Tensor AllGather::forward(AutogradContext* context, const torch::Tensor& tensor,
                                 const Mesh& mesh) {
  save_mesh(*context, mesh);
  return gathered(tensor, *state_of(mesh));
}
variable_list AllGather::backward(AutogradContext* context, const variable_list& gradients) {
  return {SumOfParts::apply(gradients[0], saved_mesh(*context)), {}};
}

torch::Tensor SumOfParts::forward(AutogradContext* context, const torch::Tensor& tensor,
                                  const Mesh& mesh) {
  save_mesh(*context, mesh);
  return scattered_sum(tensor, *state_of(mesh));
}
variable_list SumOfParts::backward(AutogradContext* context, const variable_list& gradients) {
  return {AllGather::apply(gradients[0], saved_mesh(*context)), {}};
}

}  // namespace

std::vector<torch::Tensor> all_gather(const torch::Tensor& tensor, const Mesh& mesh) {
  require_dense("all_gather", tensor);
  return AllGather::apply(tensor, mesh).unbind(0);
}

void broadcast(const torch::Tensor& tensor, int src, const Mesh& mesh) {
  require_dense("broadcast", tensor);
  if (src < 0 || src >= mesh.size()) {
    throw Error(ErrorCode::invalid_argument,
                "rank " + std::to_string(src) + " of " + std::to_string(mesh.size()) + " ranks")
        .while_doing("broadcast");
  }
  auto& state = *state_of(mesh);
  if (!state.process_group) return;
  const torch::NoGradGuard no_grad;
  const auto values = mesh.rank() == src ? plain(tensor).contiguous()
                                         : at::empty_like(tensor, at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> tensors{bytes_of_dense(values)};
  const auto call = call_of("broadcast", tensor) + " from rank " + std::to_string(src);
  // Through shared memory a source would hear nothing of the others.
  if (!state.names && tensor.is_cpu()) {
    const Purpose purpose(call);
    mesh.group().barrier();
  }
  c10d::BroadcastOptions options;
  options.rootRank = src;
  run_collective(state, call, [&](auto& group) { return group.broadcast(tensors, options); });
  if (mesh.rank() == src) return;
  await_copies();
  tensor.copy_(values);
}

void barrier(const Mesh& mesh) {
  mesh.group().barrier();
}

}  // namespace tessera
