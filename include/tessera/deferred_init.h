// deferred_init: build a model that is larger than one rank's memory.
//
//   torch::manual_seed(seed);
//   auto model = deferred_init([&] { return Gpt(config); });      // no data yet
//   for (auto& block : model->blocks) fully_shard(block, mesh);   // each gets its own now
//   fully_shard(model, mesh);
//
// Inside deferred_init every tensor that a constructor makes is on the meta device, and the way it
// was made is recorded. fully_shard, replicate, FullyShardedDataParallel and
// DistributedDataParallel materialise what they take over: a unit's parameters and buffers get
// their data, whole, on the mesh's device. Then the shard is cut out, and the whole is freed. A
// rank holds its shards and at most one whole unit. So does its process: with glibc, freed memory
// goes back to the system every 16 MiB (malloc_trim; no setting of malloc is needed, and none is
// changed).
//
// The values are bit for bit those of the same code without deferred_init, in whatever order units
// are materialised. Operators that draw random numbers are also carried out inside, on memory that
// is freed at once, so the generator goes on as it would have. When they are repeated, they start
// from the generator's state of the first time, and leave the default generator as it is. This
// costs the time of drawing twice, and memory for the tensor that is drawn.
//
// Tensors that share memory still share it afterwards. `model->to(torch::kBFloat16)` works inside,
// but not between deferred_init and materialising. Operators whose results are not tensors (item(),
// equal()) or depend on values (nonzero()) compute what they need at once. Tensors that already
// exist keep their data. torch::tensor({...}) has data as usual, and so has torch::empty of at most
// 2^17 elements with torch::kCPU given. If operators take from a large tensor with data, it must
// not be changed before the result is materialised. Reading any other tensor through data_ptr<T>()
// throws a c10::Error. Asking for a device other than the CPU throws an Error (`unsupported`).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <utility>

#include "tessera/detail/call.h"

namespace [[gnu::visibility("default")]] tessera {

namespace detail {

class Recording;

// The scope records this thread's operators while it lives. Inside another one it does nothing.
class DeferredScope {
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

  // From here on, changes to the module's tensors are noticed.
  void seal(const torch::nn::Module& module) const;

 private:
  bool is_outermost_;
};

}  // namespace detail

// Calls `make` and returns its result, a holder or a shared_ptr of a module.
template <typename Make>
auto deferred_init(Make&& make) {
  const detail::DeferredScope scope;
  auto module = std::forward<Make>(make)();
  scope.seal(detail::impl_of(module));
  return module;
}

// Whether `tensor` has no data, but a record of how to make it.
[[nodiscard]] bool is_deferred(const torch::Tensor& tensor);

// Gives data on `device` to all parameters and buffers at and below `module` that are on the meta
// device. They stay the same tensors, so copies of them, optimizers and holders see the data. With
// `param_init_fn` no recorded operator is repeated. Instead each module with such tensors of its
// own, from the outermost on, gets memory for them, and then `param_init_fn(module)` fills it.
// Throws `invalid_argument`, and changes nothing, for tensors that deferred_init has not made, and
// for those that were changed since it returned, unless there is a `param_init_fn`. Local.
void materialize(torch::nn::Module& module, torch::Device device = torch::kCPU,
                 const std::function<void(torch::nn::Module&)>& param_init_fn = {});
template <typename Impl>
void materialize(const torch::nn::ModuleHolder<Impl>& module, torch::Device device = torch::kCPU,
                 const std::function<void(torch::nn::Module&)>& param_init_fn = {}) {
  materialize(static_cast<torch::nn::Module&>(*module.ptr()), device, param_init_fn);
}

}  // namespace tessera
