// OLMo's local checkpoints: every rank's flat parameters and optimizer state as they were in memory
// (checkpoint-rows F-05, O-70 to O-77).
#include <algorithm>
#include <map>
#include <optional>

#include "checkpoint/open/rank_files.h"
#include "format/olmo/yaml.h"
#include "format/sharded/sharded.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;
using sharded::FlatHandle;

constexpr const char* kModelFolder =
    "model";  // the folder of the files that say what the others are of

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt, what);
}

// `world_size: N`, the only thing that is in metadata.yaml (checkpoint-rows F-08, O-77).
int world_size_in(const Store& store) {
  const auto source = store.open(olmo::kWorldFile);
  try {
    return olmo::world_size_of(read_all(*source, olmo::kYamlLimit));
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
}

using IdsAndNames = std::vector<std::pair<std::int64_t, std::string>>;  // of parameters
using HandleOfId = std::map<std::int64_t, std::size_t>;  // index into the rank's flat parameters

// Names and places of one rank's parameters.
class RankState {
 public:
  RankState(std::vector<FlatHandle> handles, int rank) : handles_(std::move(handles)), rank_(rank) {
    for (const FlatHandle& handle : handles_) {
      for (const FlatMember& member : handle.members) {
        if (!by_name_.emplace(member.name, &member).second) {
          corrupt("parameter '" + printable(member.name, 200) + "' is in two flat parameters");
        }
      }
    }
  }

  [[nodiscard]] const std::vector<FlatHandle>& handles() const { return handles_; }

  [[nodiscard]] Value model() const {
    Value made = Value::dict();
    for (const FlatHandle& handle : handles_) {
      for (const FlatMember& member : handle.members) {
        made.set_item(Value(member.name), sharded_leaf(member, handle.data, member.base));
      }
    }
    return made;
  }

  [[nodiscard]] Value optimizer(const Value& file) const;

 private:
  // The elements that this rank holds of the parameter, from element `offset` of `data` on.
  [[nodiscard]] Value sharded_leaf(const FlatMember& member, const Tensor& data,
                                   std::int64_t offset) const {
    Tensor tensor;
    tensor.dtype = data.dtype;
    tensor.shape = member.shape;
    tensor.sharded = true;
    if (numel(member.range) > 0) {
      tensor.pieces.push_back(sharded::flat_piece(data, member.range, offset, rank_));
    }
    return Value(std::move(tensor));
  }

  [[nodiscard]] Value state_of(const Value& values, const FlatMember& member, std::int64_t offset,
                               std::int64_t expected) const;
  [[nodiscard]] Value by_ids(const Value& state, const IdsAndNames& names) const;
  [[nodiscard]] Value by_handles(const Value& state, const HandleOfId& handle_of) const;
  [[nodiscard]] HandleOfId handles_in_order(const Value& groups) const;
  [[nodiscard]] std::optional<HandleOfId> handles_of(const Value& groups,
                                                     const IdsAndNames& names) const;

  std::vector<FlatHandle> handles_;
  std::map<std::string, const FlatMember*> by_name_;
  int rank_;
};

// Tensors of a parameter's state are split like it, all but scalars.
bool is_split(const Value& value) {
  return value.is(Kind::tensor) && !value.as_tensor().shape.empty();
}

// A plain tensor of that many elements, one behind the other.
bool is_flat(const Tensor& tensor, std::int64_t elements) {
  return !tensor.bare_storage && tensor.shape == Shape{elements} &&
         tensor.pieces.at(0).strides.empty();
}

// One parameter's optimizer state: tensors of `expected` elements hold this rank's of it from
// `offset` on, scalars are the same everywhere.
Value RankState::state_of(const Value& values, const FlatMember& member, std::int64_t offset,
                          std::int64_t expected) const {
  if (!values.is(Kind::dict)) corrupt("a parameter's optimizer state is not a dict");
  Value made = Value::dict();
  for (const auto& [key, value] : values.pairs()) {
    if (!is_split(value)) {
      made.set_item(key, value);
      continue;
    }
    const Tensor& tensor = value.as_tensor();
    if (!is_flat(tensor, expected)) {
      throw Error(ErrorCode::corrupt, "the state has shape " + to_string(tensor.shape) +
                                          ", this rank holds " + std::to_string(expected) +
                                          " elements of the parameter")
          .at_key(printable(member.name + "." + key_text(key)));
    }
    made.set_item(key, sharded_leaf(member, tensor, offset));
  }
  return made;
}

// The ids of a group, or what stands for them.
const Value& ids_of(const Value& group) {
  const Value* ids = find_entry_of_kind(group, "params", Kind::list);
  if (ids == nullptr) corrupt("a group of parameters without a list");
  return *ids;
}

// `given`: the param_names beside these ids.
void add_names(const Value& ids, const Value& given, IdsAndNames& names) {
  if (!given.is(Kind::list) || given.size() != ids.size()) {
    corrupt("a group has other numbers of params and of param_names");
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!given.items()[i].is(Kind::string)) corrupt("a parameter's name is not a string");
    names.emplace_back(ids.items()[i].as_int(), sharded::clean_name(given.items()[i].as_string()));
  }
}

// All groups' (checkpoint-rows O-76), or none where a group has no names: then parameters were
// flat.
IdsAndNames names_of(const Value& groups) {
  IdsAndNames names;
  for (const Value& group : groups.items()) {
    const Value& ids = ids_of(group);
    const Value* given = group.find("param_names");
    if (given == nullptr) return {};
    add_names(ids, *given, names);
  }
  return names;
}

Value clean_names(const Value& names) {
  Value clean = Value::list();
  for (const Value& name : names.items()) {
    clean.items().emplace_back(sharded::clean_name(name.as_string()));
  }
  return clean;
}

// The names of what is in the flat parameters that have these ids.
Value names_inside(const Value& ids, const std::vector<FlatHandle>& handles,
                   const HandleOfId& handle_of) {
  Value names = Value::list();
  for (const Value& id : ids.items()) {
    for (const FlatMember& member : handles.at(handle_of.at(id.as_int())).members) {
      names.items().emplace_back(member.name);
    }
  }
  return names;
}

Value clean_group(const Value& group, const std::vector<FlatHandle>& handles,
                  const HandleOfId* handle_of) {
  Value copy = Value::dict(group.pairs(), group.dict_kind());
  const Value* given = group.find("param_names");
  if (given != nullptr) copy.set_item("param_names", clean_names(*given));
  if (handle_of != nullptr) {
    const Value names = names_inside(group.at("params"), handles, *handle_of);
    copy.set_item("params", names);
    if (given != nullptr) copy.set_item("param_names", names);
  }
  return copy;
}

// The groups with clean names; where ids stand for flat parameters (`handle_of` is given), with the
// names of what is in them instead.
Value clean_groups(const Value& groups, const std::vector<FlatHandle>& handles,
                   const HandleOfId* handle_of) {
  Value made = Value::list();
  for (const Value& group : groups.items()) {
    made.items().push_back(clean_group(group, handles, handle_of));
  }
  return made;
}

// What a map from ids has for one that a file names; its end for what is no id.
template <typename Map>
auto find_id(const Map& map, const Value& id) {
  return id.is(Kind::integer) ? map.find(id.as_int()) : map.end();
}

Value RankState::by_ids(const Value& state, const IdsAndNames& names) const {
  Value made = Value::dict();
  // Every id, so that ids are in one order whichever ranks hold them.
  for (const auto& [id, name] : names) made.set_item(Value(id), Value::dict());
  const std::map<std::int64_t, std::string> name_of(names.begin(), names.end());
  for (const auto& [id, values] : state.pairs()) {
    const auto name = find_id(name_of, id);
    const auto entry = name == name_of.end() ? by_name_.end() : by_name_.find(name->second);
    if (entry == by_name_.end()) {
      corrupt("optimizer state " + render(id, 60) + " is of no parameter in the model's file");
    }
    made.set_item(id, state_of(values, *entry->second, 0, numel(entry->second->range)));
  }
  return made;
}

// Without original parameters an optimizer's parameters are flat ones, whose state is split like
// them. It comes under the names that PyTorch's full state has.
Value RankState::by_handles(const Value& state, const HandleOfId& handle_of) const {
  Value made = Value::dict();
  for (const auto& [id, values] : state.pairs()) {
    const auto found = find_id(handle_of, id);
    if (found == handle_of.end()) {
      corrupt("optimizer state " + render(id, 60) + " is of no flat parameter");
    }
    const FlatHandle& handle = handles_[found->second];
    for (const FlatMember& member : handle.members) {
      made.set_item(Value(member.name),
                    state_of(values, member, member.base, handle.data.shape[0]));
    }
  }
  return made;
}

std::string flat_name(const FlatHandle& handle) {
  return (handle.module.empty() ? "" : handle.module + ".") + "_flat_param";
}

// Which flat parameter an id stands for: by its name, "MODULE._flat_param", or where groups have no
// names by its number, in the order of modules. None: ids stand for parameters.
std::optional<HandleOfId> RankState::handles_of(const Value& groups,
                                                const IdsAndNames& names) const {
  if (names.empty()) return handles_in_order(groups);
  std::map<std::string, std::size_t> by_name;
  for (std::size_t i = 0; i < handles_.size(); ++i) by_name.emplace(flat_name(handles_[i]), i);
  HandleOfId found;
  for (const auto& [id, name] : names) {
    const auto handle = by_name.find(name);
    if (handle == by_name.end()) return std::nullopt;
    found.emplace(id, handle->second);
  }
  return found;
}

HandleOfId RankState::handles_in_order(const Value& groups) const {
  HandleOfId found;
  for (std::size_t i = 0; i < handles_.size(); ++i) found.emplace(i, i);
  for (const Value& group : groups.items()) {
    for (const Value& id : group.at("params").items()) {
      if (find_id(found, id) != found.end()) continue;
      throw Error(ErrorCode::unsupported,
                  "the optimizer's groups have no param_names and more ids than flat parameters");
    }
  }
  return found;
}

Value RankState::optimizer(const Value& file) const {
  const Value* state = find_entry_of_kind(file, "state", Kind::dict);
  const Value* groups = find_entry_of_kind(file, "param_groups", Kind::list);
  if (state == nullptr || groups == nullptr) {
    corrupt("not an optimizer's state: expected state and param_groups");
  }
  const IdsAndNames names = names_of(*groups);
  const std::optional<HandleOfId> handles = handles_of(*groups, names);
  return Value::dict(
      {{"state", handles ? by_handles(*state, *handles) : by_ids(*state, names)},
       {"param_groups", clean_groups(*groups, handles_, handles ? &*handles : nullptr)}});
}

// The files of one kind, for all ranks or none.
std::vector<ObjectInfo> files_of(const std::vector<ObjectInfo>& all, const char* part,
                                 std::size_t world, Checkpoint& checkpoint) {
  auto files = rank_files(all, own_prefix(part), checkpoint.path);
  if (files.empty()) {
    checkpoint.warnings.push_back("there are no " + std::string(part) + "/rank*.pt");
  } else if (files.size() != world) {
    throw Error(ErrorCode::incomplete, "there are " + std::to_string(files.size()) + " files " +
                                           part + "/rank*.pt, " + std::to_string(world) +
                                           " of the model")
        .at_path(checkpoint.path);
  }
  checkpoint.files.insert(checkpoint.files.end(), files.begin(), files.end());
  return files;
}

bool is_empty_dict(const Value& value) {
  return value.is(Kind::dict) && value.size() == 0;
}

// Dicts that no rank filled.
void drop_empty_states(Value& root) {
  const Value* optim = root.find("optim");
  if (optim == nullptr) return;
  Value kept = Value::dict();
  const Value state = optim->at("state");
  for (const auto& [id, values] : state.pairs()) {
    if (!is_empty_dict(values)) kept.set_item(id, values);
  }
  Value(*optim).set_item("state", kept);
}

void require_world(int said, const Checkpoint& checkpoint) {
  if (said == checkpoint.world_size) return;
  throw Error(said > checkpoint.world_size ? ErrorCode::incomplete : ErrorCode::corrupt,
              "metadata.yaml says " + std::to_string(said) + " ranks, there are files of " +
                  std::to_string(checkpoint.world_size))
      .at_path(checkpoint.path);
}

// What `work` makes of a rank's file.
template <typename Work>
auto read_with(const RankStore& from, const ObjectInfo& file, const Work& work) {
  try {
    return work(read_rank_file(from, file));
  } catch (Error& error) {
    throw error.at_path(from.store->name() + "/" + file.name);
  }
}

std::vector<Value> geometry_of(const RankState& state) {
  std::vector<Value> geometry;
  for (const FlatHandle& handle : state.handles()) geometry.push_back(handle.geometry);
  return geometry;
}

[[noreturn]] void refuse_geometry(int rank, const Checkpoint& checkpoint) {
  throw Error(ErrorCode::corrupt, "names, shapes or padding of the flat parameters of rank " +
                                      std::to_string(rank) + " are not those of rank 0")
      .at_path(checkpoint.path);
}

Checkpoint open_all(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& all) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::olmo_local;
  checkpoint.path = store->name();
  checkpoint.store = store;
  const auto models = rank_files(all, own_prefix(kModelFolder), checkpoint.path);
  const std::size_t world = models.size();
  checkpoint.files = models;
  const auto optims = files_of(all, "optim", world, checkpoint);
  const auto trains = files_of(all, "train", world, checkpoint);
  checkpoint.world_size = static_cast<int>(world);
  if (store->exists(olmo::kWorldFile)) require_world(world_size_in(*store), checkpoint);
  const RankStore from{store};
  std::vector<Value> geometry;  // rank 0's
  merge_ranks(checkpoint, checkpoint.world_size, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const RankState state(read_with(from, models[at], sharded::flat_handles), rank);
    const std::vector<Value> own = geometry_of(state);
    if (rank == 0) geometry = own;
    if (own != geometry) refuse_geometry(rank, checkpoint);
    Value tree = Value::dict({{"model", state.model()}});
    if (!optims.empty()) {
      tree.set_item("optim", read_with(from, optims[at],
                                       [&](const Value& file) { return state.optimizer(file); }));
    }
    if (!trains.empty()) {
      tree.set_item(Value(std::string(kTrainState)),
                    read_with(from, trains[at], [](Value file) { return file; }));
    }
    return tree;
  });
  drop_empty_states(*checkpoint.root);
  checkpoint.leaves = leaves_of(*checkpoint.root);
  return checkpoint;
}

}  // namespace

bool has_local_files(const std::vector<ObjectInfo>& files) {
  return has_own_files(files, kModelFolder);
}

int world_of_local(const Store& store) {
  if (store.exists(olmo::kWorldFile)) return world_size_in(store);
  return ranks_of_own(store.list_level(kModelFolder), kModelFolder);
}

Value read_local_part(const RankStore& from, int rank) {
  const auto info = [&](const std::string& name) {
    return ObjectInfo{name, from.store->open(name)->size()};
  };
  const RankState state(read_with(from, info(own_file(kModelFolder, rank)), sharded::flat_handles),
                        rank);
  Value part = Value::dict({{"model", state.model()}});
  const std::string optim = own_file("optim", rank);
  if (from.store->exists(optim)) {
    part.set_item("optim", read_with(from, info(optim),
                                     [&](const Value& file) { return state.optimizer(file); }));
    drop_empty_states(part);
  }
  part.set_item("layout", Value::list(geometry_of(state)));
  return part;
}

Checkpoint open_local(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& files) {
  std::vector<ObjectInfo> all = files;
  for (const char* part : {"optim", "train"}) {
    for (ObjectInfo& file : store->list_level(part)) all.push_back(std::move(file));
  }
  try {
    return open_all(store, all);
  } catch (const Error& error) {
    rethrow_with_missing(error, all, own_prefix(kModelFolder), world_of_local(*store));
  }
}

}  // namespace tessera
