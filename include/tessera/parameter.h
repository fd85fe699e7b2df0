// ShardedParameter: a parameter as one rank holds it; what optimizers and checkpoints work on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include "tessera/layout.h"
#include "tessera/mesh.h"

namespace [[gnu::visibility("default")]] tessera {

// ModuleRef: a module, in whatever way the caller holds it.

// Functions make it from their argument and do not keep it, because it does not own the module.
class ModuleRef {
 public:
  ModuleRef(const torch::nn::Module& module) : module_(module) {}  // NOLINT(*-explicit-*)
  template <typename Impl>
  ModuleRef(const torch::nn::ModuleHolder<Impl>& holder)  // NOLINT(*-explicit-*)
      : module_(*holder.ptr()) {}
  template <typename Impl>
  ModuleRef(const std::shared_ptr<Impl>& module)  // NOLINT(*-explicit-*)
      : module_(*module) {}

  [[nodiscard]] const torch::nn::Module& get() const noexcept { return module_; }

 private:
  const torch::nn::Module& module_;
};

namespace detail {
// The unit that a parameter belongs to.
class ParameterHome {
 public:
  virtual ~ParameterHome() = default;
  // Takes over what has been done to the module's own tensors since the last time.
  virtual void refresh() = 0;
  // What a rank holds nothing of gets no gradient there, and so its optimizer keeps no state of it
  // (FSDP1 with use_orig_params).
  [[nodiscard]] virtual bool leaves_out_empty() const noexcept = 0;
};
}  // namespace detail

// A parameter as this rank holds it.
struct ShardedParameter {
  std::vector<std::string> names;   // as in named_parameters() of the module asked for; several if
                                    // modules share the parameter; the first one is its name
  std::vector<std::int64_t> shape;  // of the whole parameter
  bool flat = false;         // FSDP1 and ShardLayout::flat: `local` is one-dimensional and counts
                             // elements, not rows
  int dim = 0;               // the dimension that is sharded; "rows" are slices of it
  std::int64_t offset = 0;   // first row (flat: element) held here; without any, the row count
  torch::Tensor local;       // the rows held here, contiguous where sharded; a leaf. Its grad()
                             // holds the same rows of the gradient averaged over the ranks, at the
                             // strides that autograd gives one. The gradient refuses norms, dot
                             // products and cat, which would cover only these rows
  bool sharded = false;      // false: fully_shard did not take it, and `local` is all of it
  std::optional<Mesh> mesh;  // set when sharded
  Placement placement = {};  // of `shape`: what each rank of the mesh holds
  // For FSDP1's flat parameter (without use_orig_params): the module's parameters in it, in their
  // order. The flat parameter's own name ends in _flat_param.
  std::vector<FlatMember> members;
  std::weak_ptr<detail::ParameterHome> home = {};  // for optimizers

  [[nodiscard]] const std::string& name() const { return names.front(); }
};

// The `local` tensors, which a torch::optim optimizer takes.
[[nodiscard]] std::vector<torch::Tensor> local_tensors(
    const std::vector<ShardedParameter>& parameters);

}  // namespace tessera
