// A model's parameters as an optimizer has them: whose unit, under which names, in which order.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fsdp/unit/unit.h"
#include "tessera/mesh.h"
#include "tessera/pytorch/optim_state_dict.h"

namespace tessera::detail {

// A tensor that an optimizer may have.
struct ModelParam {
  at::Tensor tensor;
  std::string own_name;            // the same as names[0], but of a flat parameter "..._flat_param"
  std::vector<std::string> names;  // of the module's parameters in it, as first met
  std::vector<Shape> shapes;       // of those, whole
  std::shared_ptr<Unit> unit;      // null: no unit has it ("unmanaged")
  std::vector<std::size_t> places;  // of those in the unit

  // Other ranks hold parts of it.
  [[nodiscard]] bool is_sharded() const { return unit && unit->is_sharded(); }
  // One tensor for all of the unit's parameters.
  [[nodiscard]] bool is_flat() const { return unit && unit->is_flat(); }
};

class OptimModel {
 public:
  explicit OptimModel(const torch::nn::Module& module);

  // Each once, in the order of named_parameters().
  [[nodiscard]] const std::vector<ModelParam>& params() const noexcept { return params_; }
  [[nodiscard]] const ModelParam* find(const at::Tensor& tensor) const;
  [[nodiscard]] bool has_flat() const noexcept { return has_flat_; }
  // The first name of the parameter that is also called so; empty: no parameter is (optimizer-rows
  //
  [[nodiscard]] std::string first_name(const std::string& name) const;
  // The same for a key of a state, which may be anything.
  [[nodiscard]] std::string first_name(const Value& key) const;
  // All ranks that train together; none: nothing is sharded.
  [[nodiscard]] const std::optional<Mesh>& all_ranks() const noexcept { return all_ranks_; }
  [[nodiscard]] std::shared_ptr<const OptimizerRef::Names> own_names() const;

 private:
  using UnitNames = std::unordered_map<const Unit*, std::string>;
  void add(const std::string& name, const at::Tensor& tensor, const UnitNames& unit_names);
  [[nodiscard]] static std::string flat_name(const UnitNames& unit_names, const Unit& unit);

  std::vector<ModelParam> params_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_tensor_;
  std::unordered_map<std::string, std::string> aliases_;
  bool has_flat_ = false;
  std::optional<Mesh> all_ranks_;
};

// The ranks that take part: those of the mesh asked for, else of the model's, else this one alone.
class GroupOf {
 public:
  GroupOf(const std::optional<Mesh>& asked, const OptimModel& model);
  [[nodiscard]] Group& get() const noexcept { return *group_; }
  // Null: this rank alone.
  [[nodiscard]] const std::optional<Mesh>& mesh() const noexcept { return mesh_; }

 private:
  std::optional<Mesh> mesh_;
  std::unique_ptr<Group> solo_;
  Group* group_;
};

// A key of an optimizer's state and what it is of.
struct OptimKey {
  Value key;
  const ModelParam* param = nullptr;
};

// The keys that `optim` has, by number or name, in its order; with `optim_input` the numbers count
// through that, without both through the model's parameters. Tensors that are not the model's
// throw `invalid_argument`.
[[nodiscard]] std::vector<OptimKey> keys_of(const OptimModel& model,
                                            const std::optional<OptimizerRef>& optim,
                                            const std::optional<OptimInput>& optim_input);
// The parameters of the optimizer, by group.
using ParamGroup = std::vector<const ModelParam*>;
[[nodiscard]] std::vector<ParamGroup> params_by_group(const OptimModel& model,
                                                      const OptimizerRef& optim);
// The names by which a state has what lies in them.
[[nodiscard]] std::vector<std::string> names_of(const ParamGroup& group);

}  // namespace tessera::detail
