#include "optim_state/load_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "base/log.h"
#include "layout/plan.h"
#include "optim/optimizer_state.h"
#include "optim_state/chunks.h"
#include "optim_state/load_plan.h"
#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "torch/mesh_state.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

constexpr const char* kLoading = "loading optimizer state";

const Value& require_state(const Value* tree) {
  const auto* state =
      tree == nullptr || !tree->is(Value::Kind::dict) ? nullptr : tree->find("state");
  if (state != nullptr) return *state;
  throw Error(ErrorCode::invalid_argument,
              "`optim_state_dict` must have the keys \"state\" to be a valid optimizer state dict");
}

// The states of one unit, or of parameters that none has, of one name and dtype: what moves at
// once.
struct BatchedState {
  std::size_t item;  // in the plan
  const LoadEntry* entry;
};
struct Batch {
  std::shared_ptr<Unit> unit;
  bool in_chunks;
  std::string name;
  DType dtype;
  std::vector<BatchedState> states;

  [[nodiscard]] bool is_sharded() const { return unit && unit->is_sharded(); }
};

// The state of one parameter of the module, in a batch.
struct ParamState {
  const ModelParam* param;
  std::size_t index;  // in it
  const Tensor* tensor;

  [[nodiscard]] const Shape& shape() const { return param->shapes[index]; }
  // Its place in the unit.
  [[nodiscard]] std::size_t in_unit() const { return param->places[index]; }
};

// The part of a state in chunks that one rank of a mesh has.
struct RankStates {
  Value tree;
  NamedStates states;
};

class Loader {
 public:
  Loader(const OptimModel& model, const LoadRequest& request, const GroupOf& group,
         const Value* tree);
  // The states by parameter of the model; none: nothing for it.
  [[nodiscard]] std::vector<Value> states();
  [[nodiscard]] std::vector<Value::Pair> others() const;
  [[nodiscard]] const Value& tree() const noexcept { return tree_; }

 private:
  void plan(const Value& tree);
  void plan_first_ranks(const Value* tree);
  void plan_own(const Value* tree);
  void make_batches();
  [[nodiscard]] bool is_in_chunks() const { return request_.source == LoadSource::chunks; }
  // Whether this rank has the tensors themselves, not only what rank 0 says of them.
  [[nodiscard]] bool has_tensors() const {
    return request_.source != LoadSource::first_rank || group_.get().rank() == 0;
  }
  [[nodiscard]] std::vector<ParamState> param_states_of(const Batch& batch) const;
  [[nodiscard]] std::vector<at::Tensor> whole_tensors(const std::vector<ParamState>& params) const;
  void load(const Batch& batch);
  void load_whole(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made);
  void load_chunks(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made);
  void keep(const Batch& batch, const at::Tensor& to, const std::vector<at::Tensor>& made);
  [[nodiscard]] Value loaded_state(std::size_t item) const;
  [[nodiscard]] Value kept_state(const ModelParam& param) const;

  const OptimModel& model_;
  const LoadRequest& request_;
  const GroupOf& group_;
  Value tree_;
  std::optional<NamedStates> named_;
  std::vector<LoadItem> plan_;
  std::vector<Batch> batches_;
  std::vector<std::map<std::string, Value>> loaded_;                 // by item: tensors
  std::map<const MeshState*, std::vector<RankStates>> rank_states_;  // by mesh, then by rank
};

// Rank 0's tree: what is of no parameter travels with all its tensors, in a list.
Value message_of(const OptimModel& model, const Value& tree) {
  std::vector<Value::Pair> states;
  for (const auto& [key, value] : require_state(&tree).pairs()) {
    const bool is_param = !model.first_name(key).empty();
    states.emplace_back(key, is_param ? value : Value::list({value}));
  }
  auto message = Value::dict(tree.pairs());
  message.set_item("state", Value::dict(std::move(states)));
  return message;
}

// The mesh whose ranks have the parts of what `unit` has or, without one, of what none has.
std::optional<Mesh> mesh_of(const std::shared_ptr<Unit>& unit, const GroupOf& group) {
  return unit ? unit->mesh() : group.mesh();
}

// The meshes of the model's parameters, each once.
std::vector<Mesh> meshes_of(const OptimModel& model, const GroupOf& group) {
  std::vector<Mesh> meshes;
  std::set<const MeshState*> seen;
  for (const auto& param : model.params()) {
    const auto mesh = mesh_of(param.unit, group);
    if (mesh && seen.insert(state_of(*mesh).get()).second) meshes.push_back(*mesh);
  }
  return meshes;
}

Loader::Loader(const OptimModel& model, const LoadRequest& request, const GroupOf& group,
               const Value* tree)
    : model_(model), request_(request), group_(group) {
  if (request.source == LoadSource::first_rank) {
    plan_first_ranks(tree);
  } else {
    plan_own(tree);
  }
  make_batches();
}

void Loader::plan(const Value& tree) {
  named_.emplace(model_, require_state(&tree));
  plan_ = plan_load(model_, *named_, is_in_chunks());
}

// The description first, so that what is wrong with it is every rank's to say.
void Loader::plan_first_ranks(const Value* tree) {
  tree_ = first_tree(group_.get(), kLoading, [&] {
    (void)require_state(tree);
    return message_of(model_, *tree);
  });
  plan(tree_);
  if (group_.get().rank() == 0) plan(*tree);
}

void Loader::plan_own(const Value* tree) {
  const auto prepare = [&] {
    (void)require_state(tree);
    tree_ = *tree;
    plan(tree_);
    return Value::dict({{"state", require_state(&tree_)}});
  };
  const auto meshes = is_in_chunks() ? meshes_of(model_, group_) : std::vector<Mesh>();
  for (const auto& mesh : meshes) {
    auto& of_mesh = rank_states_[state_of(mesh).get()];
    for (auto& described : all_trees(mesh.group(), kLoading, prepare))
      of_mesh.push_back({described, NamedStates(model_, described.at("state"))});
  }
  if (meshes.empty()) (void)prepare();
}

bool has_parts(const LoadEntry& entry) {
  return std::ranges::any_of(entry.tensors, [](const Value* value) {
    return value != nullptr && value->as_tensor().sharded;
  });
}

void Loader::make_batches() {
  loaded_.resize(plan_.size());
  std::map<std::tuple<const Unit*, bool, std::string, DType>, std::size_t> places;
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const auto& item = plan_[i];
    for (const auto& entry : item.entries) {
      if (!entry.is_tensor) continue;
      const auto& unit = item.param->unit;
      const bool in_chunks = is_in_chunks() && (unit || has_parts(entry));
      const auto [place, is_new] = places.emplace(
          std::tuple{unit.get(), in_chunks, entry.name, entry.dtype}, batches_.size());
      if (is_new) batches_.push_back({unit, in_chunks, entry.name, entry.dtype, {}});
      batches_[place->second].states.push_back({i, &entry});
    }
  }
}

// The tensors that are there, state by state.
std::vector<ParamState> Loader::param_states_of(const Batch& batch) const {
  std::vector<ParamState> params;
  for (const auto& state : batch.states) {
    for (std::size_t i = 0; i < state.entry->tensors.size(); ++i) {
      if (const auto* value = state.entry->tensors[i])
        params.push_back({plan_[state.item].param, i, &value->as_tensor()});
    }
  }
  return params;
}

// Laid out as the unit's shard; undefined: there are no shards.
at::Tensor shard_for(const Batch& batch) {
  if (!batch.is_sharded()) return {};
  const auto elements = batch.unit->layout().shard_elements;
  const auto type = scalar_type_of(batch.dtype);
  // The optimizer sees what fills up a flat parameter, too.
  return batch.unit->geometry() == Geometry::flat ? at::zeros({elements}, type)
                                                  : at::empty({elements}, type);
}

void Loader::load(const Batch& batch) {
  const auto to = shard_for(batch);
  std::vector<at::Tensor> made;  // without a shard: a tensor of each state
  if (batch.in_chunks) {
    load_chunks(batch, to, made);
  } else {
    load_whole(batch, to, made);
  }
  keep(batch, to, made);
}

std::vector<at::Tensor> Loader::whole_tensors(const std::vector<ParamState>& params) const {
  std::vector<at::Tensor> tensors;
  for (const auto& param : params) {
    const auto& leaf = *param.tensor;
    tensors.push_back(has_tensors() ? tensor_of(leaf).contiguous()
                                    : at::empty(leaf.shape, scalar_type_of(leaf.dtype)));
  }
  if (request_.source == LoadSource::first_rank && group_.mesh())
    broadcast_over(*group_.mesh(), tensors);
  return tensors;
}

void Loader::load_whole(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made) {
  const auto params = param_states_of(batch);
  const auto tensors = whole_tensors(params);
  for (std::size_t p = 0; p < params.size(); ++p) {
    if (!to.defined()) {
      made.push_back(has_tensors() ? tensors[p].clone() : tensors[p]);
      continue;
    }
    const auto& shape = params[p].shape();
    const Part all{whole(shape), 0};
    redistribute(shape, tensors[p].view({-1}), {&all, 1}, to,
                 part_of(*batch.unit, params[p].in_unit(), batch.unit->mesh().rank()));
  }
}

std::vector<Slice> slices_of(const Tensor* tensor) {
  std::vector<Slice> slices;
  if (tensor == nullptr) return slices;
  for (const auto& piece : tensor->pieces) slices.push_back(piece.slice);
  return slices;
}

// Every rank has what its own part needs: FSDP2 shards as chunks are cut.
bool is_all_here(const Unit& unit, std::size_t param, const Scattered& scattered) {
  if (!unit.is_sharded()) return false;
  for (std::size_t rank = 0; rank < scattered.size(); ++rank) {
    const auto part = part_of(unit, param, static_cast<int>(rank));
    const auto own = slices_of(scattered[rank]);
    std::int64_t count = 0;
    const std::span<const Slice> wanted(&part.slice, 1);
    for (const auto& copy : plan_copies(unit.layout().params[param].shape, own, wanted))
      count += copy.count;
    if (count != numel(part.slice)) return false;
  }
  return true;
}

// The elements that every rank gives, by the unit's channel where it has one.
at::Tensor exchanged(const Batch& batch, const Mesh& mesh, const at::Tensor& mine) {
  if (!batch.is_sharded()) return exchange_over(mesh, mine);
  return batch.unit->whole().exchange(mine.to(mesh.device())).cpu();
}

// The description by each rank of the state `name` of a parameter; null: it has none of it.
Scattered scattered_of(const std::vector<RankStates>& trees, const std::string& parameter,
                       const std::string& name) {
  Scattered of_ranks;
  for (const auto& of_rank : trees) {
    const auto* state = of_rank.states.find(parameter);
    const auto* value = state == nullptr ? nullptr : state->find(name);
    of_ranks.push_back(value != nullptr && is_shaped(*value) ? &value->as_tensor() : nullptr);
  }
  return of_ranks;
}

void Loader::load_chunks(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made) {
  const auto mesh = mesh_of(batch.unit, group_).value();
  const auto& trees = rank_states_.at(state_of(mesh).get());
  const auto params = param_states_of(batch);
  std::vector<Scattered> scattered;
  std::vector<const Tensor*> held;
  bool is_here = batch.unit != nullptr;
  for (const auto& param : params) {
    const auto& name = param.param->names[param.index];
    const auto& of_ranks = scattered.emplace_back(scattered_of(trees, name, batch.name));
    is_here = is_here && is_all_here(*batch.unit, param.in_unit(), of_ranks);
    held.push_back(param.tensor);
  }
  const ChunkArray chunks(std::move(scattered));
  const auto mine = chunks.give(mesh.rank(), held);
  const auto all = is_here ? mine : exchanged(batch, mesh, mine);
  for (std::size_t p = 0; p < params.size(); ++p) {
    const auto& shape = params[p].shape();
    const auto parts = is_here ? chunks.own_parts(p, mesh.rank()) : chunks.parts(p);
    if (to.defined()) {
      redistribute(shape, all, parts, to, part_of(*batch.unit, params[p].in_unit(), mesh.rank()));
    } else {
      made.push_back(at::empty(shape, all.options()));
      redistribute(shape, all, parts, made.back().view({-1}), {whole(shape), 0});
    }
  }
}

void Loader::keep(const Batch& batch, const at::Tensor& to, const std::vector<at::Tensor>& made) {
  for (std::size_t s = 0; s < batch.states.size(); ++s) {
    const auto& state = batch.states[s];
    const auto& param = *plan_[state.item].param;
    at::Tensor own;
    if (!to.defined()) {
      own = made[s];
    } else if (param.is_flat()) {
      own = to;
    } else {
      const auto base = part_of(*batch.unit, param.places.front(), batch.unit->mesh().rank()).base;
      own = to.narrow(0, base, param.tensor.numel()).view(param.tensor.sizes());
    }
    loaded_[state.item].emplace(batch.name, leaf_of(own));
  }
}

// FSDP1's optimizers keep no state of what a rank holds nothing of; FSDP2's do.
bool keeps_state_of(const ModelParam& param) {
  return !param.is_sharded() || !param.unit->leaves_out_empty() || param.tensor.numel() > 0;
}

Value Loader::loaded_state(std::size_t item) const {
  std::vector<Value::Pair> pairs;
  for (const auto& entry : plan_[item].entries) {
    pairs.emplace_back(entry.name,
                       entry.is_tensor ? loaded_[item].at(entry.name) : deep_copy(entry.value));
  }
  return Value::dict(std::move(pairs));
}

// An optimizer by names has made its states early and keeps those (optimizer-rows R-18).
Value Loader::kept_state(const ModelParam& param) const {
  if (!request_.by_name || !request_.optim) return {};
  return deep_copy(request_.optim->access().state(param.tensor));
}

std::vector<Value> Loader::states() {
  for (const auto& batch : batches_) load(batch);
  std::vector<Value> states(model_.params().size());
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const auto& param = *plan_[i].param;
    const auto index = static_cast<std::size_t>(&param - model_.params().data());
    states[index] = keeps_state_of(param) ? loaded_state(i) : kept_state(param);
  }
  return states;
}

std::vector<Value::Pair> Loader::others() const {
  std::vector<Value::Pair> others;
  for (const auto& [key, value] : named_->others())
    others.emplace_back(key, deep_copy(has_tensors() ? value : value.items().at(0)));
  return others;
}

struct Keys {
  std::map<const ModelParam*, Value> by_param;
  std::map<std::string, Value> by_name;
};

const Value& require_key(const OptimModel& model, const Keys& keys, const std::string& name) {
  const auto key = keys.by_name.find(model.first_name(name));
  if (key != keys.by_name.end()) return key->second;
  throw Error(ErrorCode::mismatch,
              "a group of the state lists a parameter that the optimizer does not have")
      .at_key(name);
}

// Sorted, each once: the form that positional loading expects (optimizer-rows R-23).
Value rekeyed_groups(const OptimModel& model, const Value& groups, const Keys& keys) {
  return with_params(groups, [&](const Value::List& names) {
    std::map<KeyOrder, Value> sorted;
    for (const auto& name : names) {
      const auto& key = require_key(model, keys, name.as_string());
      sorted.emplace(order_of(key), key);
    }
    Value::List params;
    for (const auto& [order, key] : sorted) params.push_back(key);
    return params;
  });
}

Keys keys_for(const OptimModel& model, const LoadRequest& request) {
  auto optim = request.optim;
  if (optim && request.by_name) optim = optim->with_names(model.own_names());
  Keys keys;
  for (const auto& [key, param] : keys_of(model, optim, request.optim_input)) {
    keys.by_param.emplace(param, key);
    for (const auto& name : param->names) keys.by_name.emplace(name, key);
  }
  return keys;
}

// `states`: by parameter of the model.
std::vector<Value::Pair> keyed_states(const OptimModel& model, const Keys& keys,
                                      const std::vector<Value>& states) {
  std::vector<Value::Pair> keyed;
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (states[i].is(Value::Kind::none)) continue;
    const auto key = keys.by_param.find(&model.params()[i]);
    if (key == keys.by_param.end()) {
      log_of_all(LogLevel::warning, "the state of parameter '" + model.params()[i].own_name +
                                        "' is of no parameter of the optimizer: it is left out");
      continue;
    }
    keyed.emplace_back(key->second, states[i]);
  }
  return keyed;
}

}  // namespace

Value load_state(const torch::nn::Module& module, const Value* state, const LoadRequest& request) {
  const torch::NoGradGuard no_grad;
  const OptimModel model(module);
  const GroupOf group(request.group, model);
  Loader loader(model, request, group, state);
  const auto states = loader.states();
  const auto keys = keys_for(model, request);
  auto made = keyed_states(model, keys, states);
  for (auto& other : loader.others()) made.push_back(std::move(other));
  auto result = Value::dict({{"state", Value::dict(std::move(made))}});
  if (const auto* groups = loader.tree().find("param_groups"))
    result.set_item("param_groups", rekeyed_groups(model, *groups, keys));
  return result;
}

}  // namespace tessera::detail
