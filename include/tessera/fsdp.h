// fully_shard: train a model that no rank holds whole.
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x); };
//   TESSERA_MODULE(Block);                            // instead of TORCH_MODULE(Block)
//
//   Mesh mesh = Mesh::from_environment();
//   Gpt model(config);
//   for (auto& block : model->blocks) fully_shard(block, mesh);   // inside out
//   fully_shard(model, mesh);
//   AdamW optimizer(sharded_parameters(model));
//   auto loss = cross_entropy(model(input), target);
//   loss.backward();
//   optimizer.step();
//
// What an optimizer sees is this rank's part of parameters and gradients. Elementwise optimizers
// (Adam, SGD and the like) are right on parts; whatever takes norms or dot products is not. Refused
// with an `Error` are torch::optim::LBFGS, torch::nn::utils::clip_grad_norm_ (call
// tessera::clip_grad_norm) and torch::autograd::grad of parameters (call backward). Not noticed are
// sums and means that an optimizer of your own takes over a parameter or its gradient, and norms of
// parameters: they are those of the part.
//
// fully_shard turns a module's parameters, less those of modules it contains that are sharded
// already, into one *unit*. Every rank keeps 1/N of each parameter: rows [r*c, (r+1)*c) of
// dimension 0 with c = ceil(rows/N), so that the last ranks may hold fewer rows or none. The unit
// is gathered when its module is called, freed when the call returns, gathered again for its
// backward, and afterwards its gradients are averaged over the ranks, each rank getting the part
// that it holds.
//
// Gradients of gradients are not supported: backward(create_graph) is an error. Names of modules
// and parameters may not change after fully_shard. Ranks have to call the same units in the same
// order and freeze the same parameters. The first training pass compares both, each gather and
// reduction its unit, and each reduction the number of training passes since the last reset: where
// ranks differ they throw `mismatch`, and no rank computes with another unit's or step's numbers.
//
// Apply it to the outermost module too: what no unit holds is trained by each rank for itself. A
// warning in the log names such parameters when sharded_parameters is asked or a training state is
// saved.
//
// Calls have to be seen. These are: a call of a TESSERA_MODULE holder, `model(x)`;
// `call_module(module, x)` for every module, also torch's own; and a slot of a
// torch::nn::Sequential below a sharded module. These are not: `module->forward(x)`, calls of a
// holder made by TORCH_MODULE or of an AnyModule that is a member, and those that libtorch's own
// modules make (the layers of a Transformer; refused when the module around them is sharded). They
// find a parameter without data and throw. The error is an `Error` inside a call that was seen, and
// a c10::Error with the same text elsewhere; it names the unit and the fix. Nothing ever computes
// with a shard by accident.
//
// Between calls the module's own parameter tensors keep their shape but have no data. What an
// optimizer works on is `ShardedParameter::local`, which is also where gradients appear.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/detail/call.h"
#include "tessera/detail/slot.h"
#include "tessera/mesh.h"
#include "tessera/module_ref.h"
#include "tessera/parameter.h"
#include "tessera/shard_options.h"

namespace tessera {

// A module as the functions below take it: a holder or a shared_ptr of its class, which has
// forward. Made where they are called.
class UnitMember {
 public:
  template <typename Impl>
  UnitMember(const std::shared_ptr<Impl>& module)  // NOLINT(*-explicit-*)
      : module_{module, detail::make_slot_maker(module)} {
    detail::check_has_forward<Impl>();
  }
  template <typename Impl>
  UnitMember(const torch::nn::ModuleHolder<Impl>& module)  // NOLINT(*-explicit-*)
      : UnitMember(module.ptr()) {}
  [[nodiscard]] const detail::UnitModule& module() const noexcept { return module_; }

 private:
  detail::UnitModule module_;
};

// Makes the parameters of `module` that no unit has yet into one unit over `mesh`. Apply it inside
// out. Ranks must have built the same module; the values of rank r's own rows are kept. Throws
// `invalid_argument` for a module that is a unit already, or is inside of one whose unit was made
// before, a scalar parameter, parameters of mixed dtype or device, or a parameter that a unit
// elsewhere holds too; `mismatch` when shapes differ over the ranks. What is on the meta device
// gets its data first, see tessera/deferred_init.h; ignored parameters do not. Collective.
void fully_shard(const UnitMember& module, const Mesh& mesh, const ShardOptions& options = {});
// The same over two dimensions: parameters are sharded over `mesh.shard`, and copies of them are
// kept in step over `mesh.replicate`; gradients are averaged over all ranks (PyTorch's HSDP).
void fully_shard(const UnitMember& module, const HybridMesh& mesh,
                 const ShardOptions& options = {});

// Several modules as one unit, `fully_shard({norm, head}, mesh)`: gathered by the call of the first
// of them and freed when all have been called, or with the outermost call; reduced when the
// backwards of all that were called are done. None of them can be the model's outermost module.
// Those that another one contains count with it.
void fully_shard(const std::vector<UnitMember>& modules, const Mesh& mesh,
                 const ShardOptions& options = {});
void fully_shard(const std::vector<UnitMember>& modules, const HybridMesh& mesh,
                 const ShardOptions& options = {});

// Leaves the parameters whole and where they are, on every rank, and averages their gradients:
// data parallel training (PyTorch's `replicate`; FSDP's NO_SHARD). Any optimizer on
// module->parameters() works. Calls have to be seen as above. A parameter that no rank used keeps
// the gradient it had. When the module is the only unit of its model, gradients travel in buckets
// while backward goes on. Ranks must have the same values, see sync_module_states. Collective.
//
// A forward talks to nobody, so one rank may evaluate alone, in eval() or without gradients. In
// training each rank has to call the model as often as the others: who did not, and left out a
// backward, gets `mismatch` at the next reduction, as all others do. A rank that leaves out whole
// steps goes through the others' ones with its later batches, until it comes to its end first.
void replicate(const UnitMember& module, const Mesh& mesh, const ReplicateOptions& options = {});

// Gives every rank rank 0's parameters and buffers. Before sharding. Throws `invalid_argument` for
// what is on the meta device. Collective.
void sync_module_states(ModuleRef module, const Mesh& mesh);
// The same for buffers alone, at any time.
void sync_buffers(ModuleRef module, const Mesh& mesh);

// module.forward(arguments...), with the steps of its unit before and after when it has one.
// `module` is a holder or an Impl; the result is that of forward.
template <typename Module, typename... Arguments>
decltype(auto) call_module(Module&& module, Arguments&&... arguments) {
  return detail::call_module(detail::impl_of(module), std::forward<Arguments>(arguments)...);
}

// The same with another method than forward: call_method(&GptImpl::encode, model, tokens). What
// PyTorch's register_fsdp_forward_method is for.
template <typename Method, typename Module, typename... Arguments>
decltype(auto) call_method(Method method, Module&& module, Arguments&&... arguments) {
  return detail::call_method(method, detail::impl_of(module),
                             std::forward<Arguments>(arguments)...);
}

// Every parameter of `module`, each once, in the order of named_parameters(). A module that is not
// sharded gives its parameters whole. The tensors stay the same for the module's life.
//
// Parameters may be frozen and thawed through the module or through `local` (set_requires_grad),
// alike on every rank. Values may be put into the module with set_data, whole, on every rank: they
// are taken over when the module is next called or saved, when this function is called, and by
// AdamW::step. (An optimizer of torch::optim that steps before that changes the old values, and the
// new ones win.) Throws `invalid_argument` naming the parameter when they have another shape or
// device.
[[nodiscard]] std::vector<ShardedParameter> sharded_parameters(ModuleRef module);

// The following act on every unit at or below `module`. More can be changed about units while they
// train: tessera/unit_controls.h.

// False: backward keeps whole gradients on each rank, adds to them, and does not talk; the first
// backward after it is true again reduces all of them. For accumulating over micro-batches. Every
// rank has to do it alike. Without `recurse`: the unit of `module` alone.
void set_requires_gradient_sync(ModuleRef module, bool sync, bool recurse = true);

// Within its life that is false for the units below `module`; afterwards it is what it was, also
// after an exception. PyTorch's no_sync(). Throws `invalid_argument` in a forward or backward.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(ModuleRef module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::pair<std::weak_ptr<detail::Unit>, bool>> before_;
};

// After an exception in forward or backward that every rank has thrown: waits for what is under
// way, forgets gradients and graphs, frees the gathered parameters. The model can be used again. On
// the root; every rank calls it, at any time.
//
// An exception that only one rank has thrown leaves the others in a collective: they get `mismatch`
// when this rank next calls another one, else `timeout`, and then the mesh is of no use any more:
// what it is asked for throws. Ranks are brought together again by new processes alone: let the
// exception end this one, and torchrun --max-restarts starts all of them, which resume from the
// last checkpoint. What only one rank may throw and calls no unit (reading a batch) can be agreed
// on before (`agree` of tessera/comm.h): then all ranks throw.
void abandon_step(ModuleRef module);

// Gathers the parameters as they are now and keeps them, so that they can be read through the
// module and forwards need not gather; `reshard` frees them (changes are lost). Collective.
void unshard(ModuleRef module);
void reshard(ModuleRef module);

// A holder whose calls are seen; otherwise torch's.
template <typename Impl>
class ModuleHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments)
      -> torch::detail::return_type_of_forward_t<Impl, Arguments...> {
    return call_module(*this, std::forward<Arguments>(arguments)...);
  }
};

}  // namespace tessera

// Defines class `Name`, the holder of `NameImpl`. Instead of TORCH_MODULE(Name).
#define TESSERA_MODULE_IMPL(Name, ImplType)                                                        \
  class Name : public ::tessera::ModuleHolder<ImplType> { /* NOLINT(bugprone-macro-parentheses) */ \
   public:                                                                                         \
    using ::tessera::ModuleHolder<ImplType>::ModuleHolder;                                         \
    Name() = default;                                                                              \
  }
#define TESSERA_MODULE(Name) TESSERA_MODULE_IMPL(Name, Name##Impl)
