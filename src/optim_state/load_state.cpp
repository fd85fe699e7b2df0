#include "optim_state/load_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "base/log.h"
#include "fsdp/unit/broadcast.h"
#include "layout/plan.h"
#include "optim/state_key.h"
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
struct Slot {
  std::size_t item;  // in the plan
  const LoadEntry* entry;
};
struct Batch {
  std::shared_ptr<Unit> unit;
  bool in_chunks;
  std::string name;
  DType dtype;
  std::vector<Slot> slots;
};

// Of a state in chunks: what one rank of a mesh has.
struct ToldStates {
  Value tree;
  NamedStates states;
};

class Loader {
 public:
  Loader(const OptimModel& model, const LoadRequest& request, const GroupOf& group,
         const Value* tree);
  // By parameter of the model; none: nothing for it.
  [[nodiscard]] std::vector<Value> states();
  [[nodiscard]] std::vector<Value::Pair> others() const;
  [[nodiscard]] const Value& tree() const noexcept { return tree_; }

 private:
  void make_batches();
  void load(const Batch& batch);
  void load_whole(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made);
  void load_chunks(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made);
  void keep(const Batch& batch, const at::Tensor& to, const std::vector<at::Tensor>& made);
  [[nodiscard]] bool is_held(const ModelParam& param) const;

  const OptimModel& model_;
  const LoadRequest& request_;
  const GroupOf& group_;
  Value tree_;
  std::optional<NamedStates> named_;
  std::vector<LoadItem> plan_;
  std::vector<Batch> batches_;
  std::vector<std::map<std::string, Value>> loaded_;          // by item: tensors
  std::map<const MeshState*, std::vector<ToldStates>> told_;  // by mesh, then by rank
};

// Rank 0's tree: what is of no parameter travels with all its tensors, in a list.
Value message_of(const OptimModel& model, const Value& tree) {
  std::vector<Value::Pair> states;
  for (const auto& [key, value] : require_state(&tree).pairs()) {
    const bool is_param = key.is(Value::Kind::string) && !model.first_name(key.as_string()).empty();
    states.emplace_back(key, is_param ? value : Value::list({value}));
  }
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : tree.pairs()) {
    const bool is_state = key.is(Value::Kind::string) && key.as_string() == "state";
    pairs.emplace_back(key, is_state ? Value::dict(states) : value);
  }
  return Value::dict(std::move(pairs));
}

Loader::Loader(const OptimModel& model, const LoadRequest& request, const GroupOf& group,
               const Value* tree)
    : model_(model), request_(request), group_(group) {
  if (request.source == LoadSource::first_rank) {
    // The description first, so that what is wrong with it is every rank's to say.
    tree_ = first_tree(group.get(), kLoading, [&] {
      (void)require_state(tree);
      return message_of(model, *tree);
    });
    named_.emplace(model, require_state(&tree_));
    plan_ = plan_load(model, *named_, false);
    if (group.get().rank() == 0) {
      named_.emplace(model, require_state(tree));
      plan_ = plan_load(model, *named_, false);
    }
  } else {
    const bool in_chunks = request.source == LoadSource::chunks;
    const auto prepare = [&] {
      (void)require_state(tree);
      tree_ = *tree;
      named_.emplace(model, require_state(&tree_));
      plan_ = plan_load(model, *named_, in_chunks);
      return Value::dict({{"state", require_state(&tree_)}});
    };
    if (in_chunks) {
      std::set<const MeshState*> seen;
      for (const auto& param : model.params()) {
        if (!param.unit && !group.mesh()) continue;
        const auto mesh = param.unit ? param.unit->mesh() : *group.mesh();
        if (!seen.insert(state_of(mesh).get()).second) continue;
        auto& told = told_[state_of(mesh).get()];
        for (auto& described : all_trees(mesh.group(), kLoading, prepare))
          told.push_back({described, NamedStates(model, described.at("state"))});
      }
    }
    if (told_.empty()) (void)prepare();
  }
  make_batches();
}

void Loader::make_batches() {
  loaded_.resize(plan_.size());
  std::map<std::tuple<const Unit*, bool, std::string, DType>, std::size_t> places;
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const auto& item = plan_[i];
    for (const auto& entry : item.entries) {
      if (!entry.is_tensor) continue;
      const auto& unit = item.param->unit;
      const bool in_chunks = request_.source == LoadSource::chunks &&
                             (unit || std::ranges::any_of(entry.tensors, [](const Value* value) {
                                return value != nullptr && value->as_tensor().sharded;
                              }));
      const auto [place, is_new] = places.emplace(
          std::tuple{unit.get(), in_chunks, entry.name, entry.dtype}, batches_.size());
      if (is_new) batches_.push_back({unit, in_chunks, entry.name, entry.dtype, {}});
      batches_[place->second].slots.push_back({i, &entry});
    }
  }
}

void Loader::load(const Batch& batch) {
  const bool is_sharded = batch.unit && batch.unit->is_sharded();
  at::Tensor to;  // laid out as the unit's shard
  if (is_sharded) {
    const auto elements = batch.unit->layout().shard_elements;
    const auto type = scalar_type_of(batch.dtype);
    // Of a flat parameter the optimizer sees what fills it up, too.
    to = batch.unit->geometry() == Geometry::flat ? at::zeros({elements}, type)
                                                  : at::empty({elements}, type);
  }
  std::vector<at::Tensor> made;  // without a shard: a tensor of each slot
  if (batch.in_chunks) {
    load_chunks(batch, to, made);
  } else {
    load_whole(batch, to, made);
  }
  keep(batch, to, made);
}

void Loader::load_whole(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made) {
  std::vector<at::Tensor> tensors;
  const bool here = request_.source != LoadSource::first_rank || group_.get().rank() == 0;
  for (const auto& slot : batch.slots) {
    for (const auto* value : slot.entry->tensors) {
      if (value == nullptr) continue;
      const auto& leaf = value->as_tensor();
      tensors.push_back(here ? tensor_of(leaf).contiguous()
                             : at::empty(leaf.shape, scalar_type_of(leaf.dtype)));
    }
  }
  if (request_.source == LoadSource::first_rank && group_.mesh()) {
    const auto device = group_.mesh()->device();
    for (auto& tensor : tensors) tensor = tensor.to(device);
    broadcast_from_first(tensors, *group_.mesh());
    for (auto& tensor : tensors) tensor = tensor.cpu();
  }
  std::size_t next = 0;
  for (const auto& slot : batch.slots) {
    const auto& param = *plan_[slot.item].param;
    for (std::size_t i = 0; i < slot.entry->tensors.size(); ++i) {
      if (slot.entry->tensors[i] == nullptr) continue;
      const auto& tensor = tensors[next++];
      if (!to.defined()) {
        made.push_back(here ? tensor.clone() : tensor);
        continue;
      }
      const Part all{whole(param.shapes[i]), 0};
      redistribute(param.shapes[i], tensor.view({-1}), {&all, 1}, to,
                   part_of(*batch.unit, param.places[i], batch.unit->mesh().rank()));
    }
  }
}

// Every rank has what its own part needs: FSDP2 shards as chunks are cut.
bool is_all_here(const Unit& unit, std::size_t place, const Scattered& scattered) {
  if (!unit.is_sharded()) return false;
  for (std::size_t rank = 0; rank < scattered.size(); ++rank) {
    const auto part = part_of(unit, place, static_cast<int>(rank));
    std::vector<Slice> own;
    if (scattered[rank] != nullptr) {
      for (const auto& piece : scattered[rank]->pieces) own.push_back(piece.slice);
    }
    std::int64_t count = 0;
    const std::span<const Slice> wanted(&part.slice, 1);
    for (const auto& copy : plan_copies(unit.layout().params[place].shape, own, wanted))
      count += copy.count;
    if (count != numel(part.slice)) return false;
  }
  return true;
}

// What every rank gives, by the unit's channel where it has one.
at::Tensor exchanged(const Batch& batch, const Mesh& mesh, const at::Tensor& mine) {
  if (!batch.unit || !batch.unit->is_sharded()) return exchange_over(mesh, mine);
  return batch.unit->whole().exchange(mine.to(mesh.device())).cpu();
}

// What each rank told of the state `name` of a parameter; null: it has none of it.
Scattered scattered_of(const std::vector<ToldStates>& trees, const std::string& parameter,
                       const std::string& name) {
  Scattered of_ranks;
  for (const auto& told : trees) {
    const auto* state = told.states.find(parameter);
    const auto* value = state == nullptr ? nullptr : state->find(name);
    of_ranks.push_back(value != nullptr && is_shaped(*value) ? &value->as_tensor() : nullptr);
  }
  return of_ranks;
}

void Loader::load_chunks(const Batch& batch, const at::Tensor& to, std::vector<at::Tensor>& made) {
  const auto mesh = batch.unit ? batch.unit->mesh() : group_.mesh().value();
  const auto& trees = told_.at(state_of(mesh).get());
  struct Place {
    const ModelParam* param;
    std::size_t index;
  };
  std::vector<Place> places;
  std::vector<Scattered> scattered;
  std::vector<const Tensor*> held;
  bool is_here = true;
  for (const auto& slot : batch.slots) {
    const auto& param = *plan_[slot.item].param;
    for (std::size_t i = 0; i < slot.entry->tensors.size(); ++i) {
      if (slot.entry->tensors[i] == nullptr) continue;
      const auto& of_ranks =
          scattered.emplace_back(scattered_of(trees, param.names[i], batch.name));
      is_here = is_here && batch.unit && is_all_here(*batch.unit, param.places[i], of_ranks);
      held.push_back(&slot.entry->tensors[i]->as_tensor());
      places.push_back({&param, i});
    }
  }
  const ChunkArray chunks(std::move(scattered));
  const auto mine = chunks.give(mesh.rank(), held);
  const auto all = is_here ? mine : exchanged(batch, mesh, mine);
  for (std::size_t p = 0; p < places.size(); ++p) {
    const auto& [param, index] = places[p];
    const auto& shape = param->shapes[index];
    const auto parts = is_here ? chunks.own_parts(p, mesh.rank()) : chunks.parts(p);
    if (to.defined()) {
      redistribute(shape, all, parts, to, part_of(*batch.unit, param->places[index], mesh.rank()));
    } else {
      made.push_back(at::empty(shape, all.options()));
      redistribute(shape, all, parts, made.back().view({-1}), {whole(shape), 0});
    }
  }
}

void Loader::keep(const Batch& batch, const at::Tensor& to, const std::vector<at::Tensor>& made) {
  for (std::size_t s = 0; s < batch.slots.size(); ++s) {
    const auto& slot = batch.slots[s];
    const auto& param = *plan_[slot.item].param;
    at::Tensor own;
    if (!to.defined()) {
      own = made[s];
    } else if (param.is_flat()) {
      own = to;
    } else {
      const auto base = part_of(*batch.unit, param.places.front(), batch.unit->mesh().rank()).base;
      own = to.narrow(0, base, param.tensor.numel()).view(param.tensor.sizes());
    }
    loaded_[slot.item].emplace(batch.name, leaf_of(own));
  }
}

// FSDP1's optimizers keep no state of what a rank holds nothing of (spec L-3); FSDP2's do.
bool Loader::is_held(const ModelParam& param) const {
  return !param.is_sharded() || param.unit->geometry() != Geometry::flat_original ||
         param.tensor.numel() > 0;
}

std::vector<Value> Loader::states() {
  for (const auto& batch : batches_) load(batch);
  std::vector<Value> states(model_.params().size());
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const auto& param = *plan_[i].param;
    const auto index = static_cast<std::size_t>(&param - model_.params().data());
    if (!is_held(param)) {
      // An optimizer by names has made its states early and keeps those (spec R-18).
      if (request_.by_name && request_.optim)
        states[index] = deep_copy(request_.optim->access().state(param.tensor));
      continue;
    }
    std::vector<Value::Pair> pairs;
    for (const auto& entry : plan_[i].entries) {
      pairs.emplace_back(entry.name,
                         entry.is_tensor ? loaded_[i].at(entry.name) : deep_copy(entry.value));
    }
    states[index] = Value::dict(std::move(pairs));
  }
  return states;
}

std::vector<Value::Pair> Loader::others() const {
  std::vector<Value::Pair> others;
  const bool in_list = request_.source == LoadSource::first_rank && group_.get().rank() != 0;
  for (const auto& [key, value] : named_->others())
    others.emplace_back(key, deep_copy(in_list ? value.items().at(0) : value));
  return others;
}

struct Keys {
  std::map<const ModelParam*, Value> by_param;
  std::map<std::string, Value> by_name;
};

// Sorted, each once: the form that positional loading expects (spec R-23).
Value rekeyed_groups(const OptimModel& model, const Value& groups, const Keys& keys) {
  Value::List made;
  for (const auto& group : groups.items()) {
    std::map<std::int64_t, Value> numbers;
    std::map<std::string, Value> names;
    for (const auto& listed : group.at("params").items()) {
      const auto key = keys.by_name.find(model.first_name(listed.as_string()));
      if (key == keys.by_name.end()) {
        throw Error(ErrorCode::mismatch,
                    "a group of the state lists a parameter that the optimizer does not have")
            .at_key(listed.as_string());
      }
      if (key->second.is(Value::Kind::integer)) {
        numbers.emplace(key->second.as_int(), key->second);
      } else {
        names.emplace(key->second.as_string(), key->second);
      }
    }
    Value::List params;
    for (const auto& [number, key] : numbers) params.push_back(key);
    for (const auto& [name, key] : names) params.push_back(key);
    auto copy = deep_copy(group);
    copy.set_item("params", Value::list(std::move(params)));
    made.push_back(std::move(copy));
  }
  return Value::list(std::move(made));
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

}  // namespace

Value load_state(const torch::nn::Module& module, const Value* state, const LoadRequest& request) {
  const torch::NoGradGuard no_grad;
  const OptimModel model(module);
  const GroupOf group(request.group, model);
  Loader loader(model, request, group, state);
  const auto states = loader.states();
  const auto keys = keys_for(model, request);
  std::vector<Value::Pair> made;
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (states[i].is(Value::Kind::none)) continue;
    const auto key = keys.by_param.find(&model.params()[i]);
    if (key == keys.by_param.end()) {
      log(LogLevel::warning, "the state of parameter '" + model.params()[i].own_name +
                                 "' is of no parameter of the optimizer: it is left out");
      continue;
    }
    made.emplace_back(key->second, states[i]);
  }
  for (auto& other : loader.others()) made.push_back(std::move(other));
  auto result = Value::dict({{"state", Value::dict(std::move(made))}});
  if (const auto* groups = loader.tree().find("param_groups"))
    result.set_item("param_groups", rekeyed_groups(model, *groups, keys));
  return result;
}

}  // namespace tessera::detail
