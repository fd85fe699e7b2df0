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
// An optimizer sees this rank's part of parameters and gradients. Elementwise optimizers (Adam, SGD
// and the like) are right on parts; whatever takes norms or dot products is not. Three are refused
// with an `Error`: torch::optim::LBFGS, torch::nn::utils::clip_grad_norm_ (call
// tessera::clip_grad_norm) and torch::autograd::grad of parameters (call backward). Two go
// unnoticed and cover only this rank's part: sums and means that an optimizer of your own takes
// over a parameter or its gradient, and norms of parameters.
//
// fully_shard makes one *unit* of a module's parameters, without those of modules inside it that
// are sharded already. Every rank keeps 1/N of each parameter: rows [r*c, (r+1)*c) of dimension 0,
// c = ceil(rows/N), so that the last may hold fewer or none (or see `layout`). A unit is gathered
// when its module is called, freed when the call returns, and gathered again for its backward. Then
// its gradients are averaged over the ranks, and each rank gets the part that it holds.
//
// Gradients of gradients (autograd::grad with create_graph) work where parameters stay gathered,
// else they are an error, as backward(create_graph) is. Names of modules and parameters may not
// change after fully_shard. All ranks must call the same units in the same order and freeze the
// same parameters: the first training pass compares both. Each gather and reduction compares its
// unit, and each reduction also the number of training passes since the last abandon_step. Ranks
// that differ throw `mismatch`, and no rank computes with another unit's or step's numbers.
//
// Apply it to the outermost module too: each rank trains by itself what no unit holds. A warning in
// the log names such parameters when sharded_parameters is called or a training state is saved.
//
// The runtime must see the calls of a unit. It sees the call of a TESSERA_MODULE holder,
// `model(x)`; `call_module(module, x)`, which takes every module, also torch's own; those of a
// CalledModule, for classes that cannot be changed; and slots of a torch::nn::Sequential below a
// sharded module. It does not see `module->forward(x)`, calls of a holder made by TORCH_MODULE or
// of an AnyModule that is a member, or calls that libtorch's own modules make (the layers of a
// Transformer; refused if the module around them is sharded). Such a call finds a parameter without
// data and throws: an `Error` inside a call that is seen, and elsewhere a c10::Error with the same
// text, which names the unit and the fix. Nothing ever computes with a shard by accident.
//
// Between calls the module's own parameter tensors keep their shape but have no data. An optimizer
// works on `ShardedParameter::local`, and gradients appear there, too.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/calls.h"
#include "tessera/detail/call.h"
#include "tessera/mesh.h"
#include "tessera/parameter.h"
#include "tessera/shard_options.h"

namespace [[gnu::visibility("default")]] tessera {

// Makes one unit over `mesh` of the parameters of `module` that are in no unit yet. Apply it inside
// out. All ranks must have built the same module; rank r keeps the values of its own rows. Throws
// `invalid_argument` for a module that is a unit already or lies inside one that is, a scalar
// parameter, parameters of mixed dtype or device, or a parameter that a unit elsewhere also holds;
// `mismatch` if shapes differ over the ranks. What is on the meta device gets its data first (see
// tessera/deferred_init.h), except for ignored parameters. Collective.
void fully_shard(const UnitMember& module, const Mesh& mesh, const ShardOptions& options = {});
// The same over two dimensions (PyTorch's HSDP). Parameters are sharded over `mesh.shard`, copies
// of them are kept in step over `mesh.replicate`, and gradients are averaged over all ranks.
void fully_shard(const UnitMember& module, const HybridMesh& mesh,
                 const ShardOptions& options = {});

// Makes several modules one unit, `fully_shard({norm, head}, mesh)`. The first of them that is
// called gathers it. It is freed when all have been called, or with the outermost call, and reduced
// when the backwards of all that were called are done. None of them can be the model's outermost
// module. A module inside another one of them counts with that one.
void fully_shard(const std::vector<UnitMember>& modules, const Mesh& mesh,
                 const ShardOptions& options = {});
void fully_shard(const std::vector<UnitMember>& modules, const HybridMesh& mesh,
                 const ShardOptions& options = {});

// Leaves the parameters whole and in place on every rank, and averages their gradients: data
// parallel training (PyTorch's `replicate`; FSDP's NO_SHARD). Any optimizer on module->parameters()
// works, and any mixture of dtypes. Calls must be seen, as above. A parameter that no rank used
// keeps its gradient. If the module is the only unit of its model, gradients travel in buckets
// while backward goes on. Ranks must have the same values, see sync_module_states. Collective.
//
// A forward does not communicate, so one rank may evaluate alone, in eval() or without gradients.
// In training each rank must call the model as often as the others, unless `options` allow more. If
// a rank leaves out a backward, all ranks get `mismatch` at the next reduction. One that leaves out
// whole steps joins the others' steps with its later batches, until it ends before they do.
void replicate(const UnitMember& module, const Mesh& mesh, const ReplicateOptions& options = {});

// Gives every rank rank 0's parameters and buffers. Call it before sharding. Throws
// `invalid_argument` for tensors on the meta device. Collective.
void sync_module_states(ModuleRef module, const Mesh& mesh);
// The same for buffers alone, at any time.
void sync_buffers(ModuleRef module, const Mesh& mesh);

// fully_shard and replicate as above, of a module whose calls are `call` (CalledModule of calls.h):
// a holder or a shared_ptr of any class.
template <detail::AnyModulePointer Module, detail::NoOptions Call, typename AnyMesh>
[[nodiscard]] auto fully_shard(const Module& module, const AnyMesh& mesh, Call call,
                               const ShardOptions& options = {}) {
  fully_shard(UnitMember(detail::UnitModule{detail::pointer_of(module)}), mesh, options);
  return CalledModule(detail::pointer_of(module), std::move(call));
}
template <detail::AnyModulePointer Module, detail::NoOptions Call>
[[nodiscard]] auto replicate(const Module& module, const Mesh& mesh, Call call,
                             const ReplicateOptions& options = {}) {
  replicate(UnitMember(detail::UnitModule{detail::pointer_of(module)}), mesh, options);
  return CalledModule(detail::pointer_of(module), std::move(call));
}

// Every parameter of `module`, each once, in the order of named_parameters(). If the module is not
// sharded, they are whole. The tensors stay the same for the module's life.
//
// Parameters may be frozen and thawed through the module or through `local` (set_requires_grad),
// alike on every rank. Whole values may be put into the module with set_data, on every rank. They
// are taken over when the module is next called or saved, when this function is called, and by
// AdamW::step. (An optimizer of torch::optim that steps before that changes the old values, and the
// new ones win.) Throws `invalid_argument` naming the parameter if its shape or device is another.
[[nodiscard]] std::vector<ShardedParameter> sharded_parameters(ModuleRef module);

// The following act on every unit at or below `module`. tessera/unit_controls.h has more that can
// be changed about units while they train.

// For accumulating over micro-batches. False: backward does not communicate; each rank keeps whole
// gradients and adds to them. The first backward after it is true again reduces all of them. Every
// rank must do it alike. Without `recurse` it acts on the unit of `module` alone.
void set_requires_gradient_sync(ModuleRef module, bool sync, bool recurse = true);

// NoSync turns gradient sync off for the units at and below `module` while it lives. Afterwards
// each unit has its former setting, also after an exception. This is PyTorch's no_sync(). Throws
// `invalid_argument` in a forward or backward. tessera/unit_controls.h says what zero_grad keeps.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(ModuleRef module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::pair<std::weak_ptr<detail::Unit>, bool>> before_;
};

// Resets the model after an exception that left its forward or backward on every rank: waits for
// what is under way, forgets gradients and graphs, and frees the gathered parameters. Then the
// model can be used again. Every rank calls it, on the root, at any time.
//
// An exception that only one rank has thrown leaves the others in a collective. They get `mismatch`
// when this rank next calls another one, else `timeout`. After that all use of the mesh throws, and
// only new processes bring the ranks together again: let the exception end this one, and torchrun
// --max-restarts starts all of them, which resume from the last checkpoint. If only one rank may
// throw in work that calls no unit (reading a batch), do that work in `agree` of tessera/comm.h:
// then all ranks throw.
void abandon_step(ModuleRef module);

// Gathers the parameters as they are now and keeps them, to be read through the module. Forwards
// gather anew what a rank has changed, so all ranks make them. `reshard` frees them. Collective.
void unshard(ModuleRef module);
void reshard(ModuleRef module);

}  // namespace tessera
