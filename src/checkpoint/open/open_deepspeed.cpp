// DeepSpeed's checkpoints of ZeRO 0 to 3 (docs/formats/deepspeed.md): the fp32 values of parameters
// and the optimizer's state become pieces of whole tensors, where they lie.
#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "checkpoint/open/deepspeed.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "format/sharded/sharded.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;
using deepspeed::refuse;

// What of the files is the model, or says how values are cut.
constexpr std::string_view kModelKeys[] = {
    "module",       "buffer_names",        "optimizer",
    "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params"};
constexpr std::string_view kCutKeys[] = {
    "base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups",
    "fp32_flat_groups",     "group_paddings",       "param_alignment_paddings",
    "partition_count",      "param_slice_mappings", "zero_stage"};

Value without(const Value& dict, std::span<const std::string_view> keys) {
  Value made = Value::dict();
  for (const auto& [key, value] : dict.pairs()) {
    const bool is_taken =
        key.is(Kind::string) && std::ranges::find(keys, key.as_string()) != keys.end();
    if (!is_taken) made.set_item(key, value);
  }
  return made;
}

using ZeroLeaves = std::map<std::string, Value, std::less<>>;  // by the names of parameters

class DeepSpeed {
 public:
  DeepSpeed(const std::shared_ptr<Store>& store, deepspeed::Files files)
      : from_{store}, files_(std::move(files)), path_(store->name()) {
    if (files_.model.empty()) {
      refuse(ErrorCode::incomplete,
             "there are an optimizer's files of DeepSpeed, but no *_model_states.pt, which has the "
             "names and sizes of parameters",
             path_);
    }
    const auto& [rank, file] = *files_.model.begin();
    head_path_ = path_ + "/" + file.name;
    head_ = read_rank_file(from_, file);
    if (rank > 0)
      refuse(ErrorCode::incomplete, "rank 0's file of model states is not there", path_);
    read_head();
  }

  Checkpoint open() {
    Checkpoint checkpoint;
    checkpoint.kind = CheckpointKind::deepspeed;
    checkpoint.path = path_;
    checkpoint.store = from_.store;
    checkpoint.has_types = true;
    for (const auto* part : {&files_.model, &files_.optim})
      for (const auto& [rank, file] : *part) checkpoint.files.push_back(file);
    if (files_.universal) {
      checkpoint.kind = CheckpointKind::deepspeed_universal;
      read_universal(checkpoint);
    } else if (files_.optim.empty()) {
      require_no_zero();
    } else {
      ranks_ = deepspeed::read_ranks(from_, files_);
      fragments_ = deepspeed::fragments_of(ranks_, groups_);
      if (!cuts_each()) note_what_is_left(checkpoint);
    }
    checkpoint.world_size = std::max(1, static_cast<int>(ranks_.size()));
    merge_ranks(checkpoint, trees(), [this](int rank) { return tree_of(rank); });
    return checkpoint;
  }

 private:
  [[nodiscard]] bool cuts_each() const { return !ranks_.empty() && ranks_[0].cuts_each; }

  // That are merged.
  [[nodiscard]] int trees() const {
    const bool is_cut = files_.universal && !frozen_.empty();
    return static_cast<int>(std::max<std::size_t>(1, is_cut ? frozen_world() : ranks_.size()));
  }

  [[nodiscard]] const Value* head(std::string_view key, Kind kind) const {
    return find_entry_of_kind(head_, key, kind);
  }

  void read_head() {
    for (const char* key : {"ds_autoep_layers", "autoep_layers"}) {
      if (head(key, Kind::list) == nullptr) continue;
      refuse(ErrorCode::unsupported, "experts are cut in a way that the files do not say",
             head_path_);
    }
    if (const Value* groups = head("param_shapes", Kind::list)) {
      for (const Value& shapes : groups->items()) {
        if (!shapes.is(Kind::dict))
          refuse(ErrorCode::corrupt, "param_shapes is no list of dicts", head_path_);
        groups_.push_back(deepspeed::group_of(shapes, head_path_));
        for (const deepspeed::Parameter& parameter : groups_.back()) note_name(parameter.name);
      }
    }
    if (const Value* shapes = head("frozen_param_shapes", Kind::dict)) {
      frozen_ = deepspeed::group_of(*shapes, head_path_);
      for (const deepspeed::Parameter& parameter : frozen_) note_name(parameter.name);
    }
  }
  void note_name(const std::string& name) {
    if (!names_.insert(name).second) {
      throw Error(ErrorCode::corrupt, "a parameter is in param_shapes twice")
          .at_key(printable(name))
          .at_path(head_path_);
    }
  }

  // Without files of an optimizer: the values are the model's, unless ZeRO has cut them.
  void require_no_zero() const {
    const Value* config = head("ds_config", Kind::dict);
    const Value* zero = config == nullptr ? nullptr : find_entry(*config, "zero_optimization");
    const Value* stage =
        zero == nullptr ? nullptr : find_entry_of_kind(*zero, "stage", Kind::integer);
    if (stage == nullptr || stage->as_int() == 0) return;
    refuse(ErrorCode::incomplete,
           "ZeRO has cut the values of the parameters, and the *_optim_states.pt, which have them, "
           "are not there",
           path_);
  }

  // What a rank holds of a parameter in one of its flat arrays.
  static Value leaf_of(const deepspeed::Parameter& parameter, const Tensor& array,
                       const deepspeed::Fragment& fragment, int rank) {
    Tensor tensor;
    tensor.dtype = array.dtype;
    tensor.shape = parameter.shape;
    tensor.sharded = true;
    if (fragment.range.begin < fragment.range.end)
      tensor.pieces.push_back(sharded::flat_piece(array, fragment.range, fragment.at, rank));
    return Value(std::move(tensor));
  }

  [[nodiscard]] Value tree_of(int rank) const {
    if (files_.universal) return universal_tree(rank);
    if (ranks_.empty()) return whole_tree();
    const deepspeed::ZeroRank& state = ranks_[static_cast<std::size_t>(rank)];
    auto fragment = fragments_[static_cast<std::size_t>(rank)].begin();
    ZeroLeaves found;
    Value states = Value::dict();
    for (const deepspeed::Group& group : groups_) {
      for (const deepspeed::Parameter& parameter : group) {
        const Tensor& array = state.arrays[fragment->array];
        found.emplace(parameter.name, leaf_of(parameter, array, *fragment, rank));
        const Value own = state_of(state, parameter, *fragment, rank);
        if (own.size() > 0) states.set_item(parameter.name, own);
        ++fragment;
      }
    }
    add_frozen(rank, found);
    Value optim = Value::dict({{"state", states}});
    if (state.param_groups != nullptr)
      optim.set_item("param_groups", named_groups(*state.param_groups));
    Value tree = Value::dict({{"model", model_of(rank, found)}, {"optim", optim}});
    const Value train = trainer_state(rank);
    if (train.size() > 0) tree.set_item(std::string(kTrainState), train);
    return tree;
  }

  static Value state_of(const deepspeed::ZeroRank& state, const deepspeed::Parameter& parameter,
                        const deepspeed::Fragment& fragment, int rank) {
    Value made = Value::dict();
    const Value* values = state.states[fragment.array];
    if (values == nullptr) return made;
    for (const auto& [key, value] : values->pairs()) {
      if (!value.is(Kind::tensor) || value.as_tensor().shape.empty()) {
        made.set_item(key, value);
        continue;
      }
      if (!deepspeed::is_beside(value, state, fragment.array)) {
        throw Error(ErrorCode::corrupt, "the state has shape " +
                                            to_string(value.as_tensor().shape) +
                                            ", the fp32 values beside it " +
                                            to_string(state.arrays[fragment.array].shape))
            .at_key(printable(parameter.name + "." + key_text(key)))
            .at_path(state.path);
      }
      made.set_item(key, leaf_of(parameter, value.as_tensor(), fragment, rank));
    }
    return made;
  }

  // Frozen parameters are whole in rank 0's file, or cut like others in that of each rank (ZeRO 3).
  void add_frozen(int rank, ZeroLeaves& found) const {
    const std::size_t world = frozen_world();
    if (frozen_.empty() || (rank > 0 && world == 0)) return;
    const Value file = model_file_of(rank);
    for (const deepspeed::Parameter& parameter : frozen_)
      found.emplace(parameter.name, frozen_part(parameter, file, rank, world));
  }
  // The ranks that have equal parts of them; 0: rank 0's file has all.
  [[nodiscard]] std::size_t frozen_world() const {
    if (!files_.universal) return cuts_each() ? ranks_.size() : 0;
    return files_.model.begin()->first < 0 ? 0 : files_.model.size();
  }
  // `world`: of ranks that have equal parts; 0: the file has all of it.
  [[nodiscard]] Value frozen_part(const deepspeed::Parameter& parameter, const Value& file,
                                  int rank, std::size_t world) const {
    const Value* fragments = find_entry_of_kind(file, "frozen_param_fragments", Kind::dict);
    const Value* given = fragments == nullptr ? nullptr : fragments->find(parameter.name);
    if (given == nullptr || !given->is(Kind::tensor)) refuse_frozen(parameter, rank);
    const Tensor& tensor = given->as_tensor();
    if (world == 0) {
      if (tensor.shape != parameter.shape) refuse_frozen(parameter, rank);
      return *given;
    }
    const Shape part{deepspeed::part_of_each(parameter, world)};
    if (!deepspeed::is_flat(*given) || tensor.shape != part) refuse_frozen(parameter, rank);
    const auto range = deepspeed::range_of_each(parameter, world, static_cast<std::size_t>(rank));
    return leaf_of(parameter, tensor, {range}, rank);
  }
  [[noreturn]] void refuse_frozen(const deepspeed::Parameter& parameter, int rank) const {
    throw Error(ErrorCode::corrupt,
                "frozen_param_fragments has no part of the parameter, or one of "
                "another size, on rank " +
                    std::to_string(rank))
        .at_key(printable(parameter.name))
        .at_path(path_);
  }
  [[nodiscard]] Value model_file_of(int rank) const {
    if (rank == 0) return head_;
    const auto file = files_.model.find(rank);
    if (file == files_.model.end()) {
      refuse(ErrorCode::incomplete,
             "parameters are frozen, and rank " + std::to_string(rank) +
                 "'s file of model states, which has its part of them, is not there",
             path_);
    }
    return read_rank_file(from_, file->second);
  }

  // Names as the module has them, in its order, then others. Rank 0 has buffers, too.
  [[nodiscard]] Value model_of(int rank, const ZeroLeaves& found) const {
    Value model = Value::dict({}, DictKind::ordered_dict);
    const Value* shared = head("shared_params", Kind::dict);
    const Value* module = head("module", Kind::dict);
    if (module != nullptr) {
      for (const auto& [key, value] : module->pairs()) {
        const bool is_other = !key.is(Kind::string) || !names_.contains(key.as_string());
        const bool is_shared = shared != nullptr && shared->find_key(key) != nullptr;
        if (is_other && !is_shared && rank == 0) model.set_item(key, value);
        if (is_other) continue;
        const auto own = found.find(key.as_string());
        if (own != found.end()) model.set_item(key, own->second);
      }
    }
    for (const auto& [name, value] : found)
      if (model.find(name) == nullptr) model.set_item(name, value);
    if (shared != nullptr) add_shared(*shared, found, model);
    return model;
  }
  // Several names of one parameter. A node of its own: pieces are added to each.
  void add_shared(const Value& shared, const ZeroLeaves& found, Value& model) const {
    for (const auto& [key, of] : shared.pairs()) {
      if (!key.is(Kind::string) || !of.is(Kind::string))
        refuse(ErrorCode::corrupt, "shared_params has what is no name", head_path_);
      const auto source = found.find(of.as_string());
      if (source == found.end()) {
        if (names_.contains(of.as_string())) continue;  // of another rank
        throw Error(ErrorCode::corrupt, "shared_params names what is no parameter")
            .at_key(printable(of.as_string()))
            .at_path(head_path_);
      }
      model.set_item(key, Value(Tensor(source->second.as_tensor())));
    }
  }

  // Groups say which of them they are where others have parameters.
  [[nodiscard]] Value named_groups(const Value& groups) const {
    Value made = Value::list();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      Value group = groups.at(i);
      const bool is_known = groups.size() == groups_.size() || groups.size() == 1;
      if (group.is(Kind::dict) && is_known) {
        Value names = Value::list();
        for (std::size_t of = 0; of < groups_.size(); ++of) {
          if (groups.size() != 1 && of != i) continue;
          for (const deepspeed::Parameter& parameter : groups_[of])
            names.items().emplace_back(parameter.name);
        }
        Value renamed = Value::dict();
        for (const auto& [key, value] : group.pairs())
          renamed.set_item(key, key == Value("params") ? names : value);
        group = renamed;
      }
      made.items().push_back(group);
    }
    return made;
  }

  // Of the files what is neither the model nor how values are cut.
  [[nodiscard]] Value trainer_state(int rank) const {
    Value train = Value::dict();
    if (rank == 0 && head_.is(Kind::dict)) train = without(head_, kModelKeys);
    const Value& optimizer =
        ranks_.empty() ? universal_ : ranks_[static_cast<std::size_t>(rank)].all;
    const Value rest = optimizer.is(Kind::dict) ? without(optimizer, kCutKeys) : Value::dict();
    if (rest.size() > 0) train.set_item("optimizer", rest);
    return train;
  }

  // A universal checkpoint has each parameter in a directory of its name: `fp32.pt`, and a file for
  // each tensor of its state.
  void read_universal(Checkpoint& checkpoint) {
    std::string folder = files_.universal->name;
    folder.resize(folder.rfind('/') + 1);
    universal_ = read_rank_file(from_, *files_.universal);
    if (const Value* base = find_entry(universal_, "optimizer_state_dict")) take_scalars(*base);
    std::vector<ObjectInfo> files;
    for (const ObjectInfo& file : from_.store->list(folder.substr(0, folder.size() - 1))) {
      const std::string_view name = std::string_view(file.name).substr(folder.size());
      if (std::ranges::count(name, '/') == 1 && name.ends_with(kUniversalEnd))
        files.push_back(file);
    }
    std::vector<Value> values(files.size());
    parallel_for(deepspeed::kReaders, files.size(), [&](std::size_t i) {
      values[i] = universal_value(read_rank_file(from_, files[i]), path_ + "/" + files[i].name);
    });
    for (std::size_t i = 0; i < files.size(); ++i) {
      const std::string name = files[i].name.substr(folder.size());
      const std::size_t slash = name.find('/');
      const std::string key =
          name.substr(slash + 1, name.size() - slash - 1 - kUniversalEnd.size());
      universal_values_[name.substr(0, slash)].emplace(key, values[i]);
    }
    // Of the frozen ones some have files, too, others are in those of the model.
    const auto has_files = [this](const deepspeed::Parameter& parameter) {
      return universal_values_.contains(parameter.name);
    };
    std::ranges::copy_if(frozen_, std::back_inserter(frozen_files_), has_files);
    std::erase_if(frozen_, has_files);
    checkpoint.files.push_back(*files_.universal);
    checkpoint.files.insert(checkpoint.files.end(), files.begin(), files.end());
  }
  // The tensor alone, or with how ranks of tensor parallelism cut it.
  static Value universal_value(const Value& file, const std::string& path) {
    const Value* tensor =
        file.is(Kind::tensor) ? &file : find_entry_of_kind(file, "param", Kind::tensor);
    if (tensor == nullptr) refuse(ErrorCode::corrupt, "there is no tensor of a parameter", path);
    return *tensor;
  }

  // Above rank 0 there are parts of frozen parameters alone.
  [[nodiscard]] Value universal_tree(int rank) const {
    ZeroLeaves found;
    Value states = Value::dict();
    if (rank == 0) {
      for (const deepspeed::Group& group : groups_) take_universal(group, found, states);
      take_universal(frozen_files_, found, states);
    }
    add_frozen(rank, found);
    Value tree = Value::dict({{"model", model_of(rank, found)}});
    if (rank > 0) return tree;
    tree.set_item("optim", Value::dict({{"state", states}}));
    for (const char* key : {"base_optimizer_state", "optimizer_state_dict"}) {
      const Value* base = find_entry_of_kind(universal_, key, Kind::dict);
      const Value* groups =
          base == nullptr ? nullptr : find_entry_of_kind(*base, "param_groups", Kind::list);
      if (groups != nullptr) tree.at("optim").set_item("param_groups", named_groups(*groups));
    }
    tree.set_item(std::string(kTrainState), trainer_state(0));
    return tree;
  }
  void take_universal(const deepspeed::Group& group, ZeroLeaves& found, Value& states) const {
    for (const deepspeed::Parameter& parameter : group) take_universal(parameter, found, states);
  }
  void take_universal(const deepspeed::Parameter& parameter, ZeroLeaves& found,
                      Value& states) const {
    const auto values = universal_values_.find(parameter.name);
    if (values == universal_values_.end() || !values->second.contains("fp32")) {
      throw Error(ErrorCode::incomplete, "there is no file " +
                                             std::string(deepspeed::kUniversalFolder) +
                                             "/NAME/fp32.pt of the parameter")
          .at_key(printable(parameter.name))
          .at_path(path_);
    }
    Value own = Value::dict();
    for (const auto& [key, value] : values->second) {
      const Value shaped =
          value.as_tensor().shape.empty() ? value : with_shape(parameter, key, value);
      if (key == "fp32") {
        found.emplace(parameter.name, shaped);
      } else {
        own.set_item(key, shaped);
      }
    }
    for (const auto& [key, value] : universal_scalars_)
      if (own.size() > 0 && own.find_key(key) == nullptr) own.set_item(key, value);
    if (own.size() > 0) states.set_item(parameter.name, own);
  }
  // What the state has of all parameters alike, such as the step: of ZeRO 3 no file has it.
  void take_scalars(const Value& base) {
    const Value* states = find_entry_of_kind(base, "state", Kind::dict);
    if (states == nullptr || states->size() == 0 || !states->pairs()[0].second.is(Kind::dict))
      return;
    for (const auto& [key, value] : states->pairs()[0].second.pairs())
      if (!value.is(Kind::tensor) || value.as_tensor().shape.empty())
        universal_scalars_.emplace_back(key, value);
  }
  // Of ZeRO 3 the tensors are flat.
  [[nodiscard]] Value with_shape(const deepspeed::Parameter& parameter, const std::string& key,
                                 const Value& value) const {
    if (value.as_tensor().shape == parameter.shape) return value;
    if (!deepspeed::is_flat(value) ||
        deepspeed::length_of(value.as_tensor()) != parameter.elements) {
      throw Error(ErrorCode::corrupt, "the tensor has shape " + to_string(value.as_tensor().shape) +
                                          ", the parameter " + to_string(parameter.shape))
          .at_key(printable(parameter.name + "." + key))
          .at_path(path_);
    }
    Tensor tensor = value.as_tensor();
    tensor.shape = parameter.shape;
    tensor.pieces[0].slice = whole(parameter.shape);
    return Value(std::move(tensor));
  }

  // Without ZeRO one file has everything.
  [[nodiscard]] Value whole_tree() const {
    Value tree = Value::dict();
    if (const Value* module = head("module", Kind::dict)) tree.set_item("model", *module);
    if (const Value* optimizer = head("optimizer", Kind::dict)) tree.set_item("optim", *optimizer);
    tree.set_item(std::string(kTrainState), trainer_state(0));
    return tree;
  }

  void note_what_is_left(Checkpoint& checkpoint) const {
    checkpoint.warnings.push_back(
        "the model is in its fp32 values; copies of it in 16 bits, and what the optimizer has no "
        "values of, are in " +
        files_.model.begin()->second.name + ", which can be opened alone");
  }

  static constexpr std::string_view kUniversalEnd = ".pt";

  const RankStore from_;
  const deepspeed::Files files_;
  const std::string path_;
  std::string head_path_;
  Value head_;                            // rank 0's file of model states
  std::vector<deepspeed::Group> groups_;  // of param_shapes
  deepspeed::Group frozen_;               // that files of the model have
  deepspeed::Group frozen_files_;         // that have files of their own (universal)
  std::set<std::string> names_;           // of parameters
  std::vector<deepspeed::ZeroRank> ranks_;
  std::vector<deepspeed::Fragments> fragments_;  // of each rank
  Value universal_;                              // optimizer_state.pt
  std::map<std::string, std::map<std::string, Value>, std::less<>> universal_values_;
  std::vector<std::pair<Value, Value>> universal_scalars_;  // of the state of every parameter
};

}  // namespace

bool has_deepspeed_files(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, deepspeed::is_file, &ObjectInfo::name);
}

Checkpoint open_deepspeed(const std::shared_ptr<Store>& store,
                          const std::vector<ObjectInfo>& files) {
  Checkpoint checkpoint = DeepSpeed(store, deepspeed::files_of(files, store->name())).open();
  for (const ObjectInfo& file : files)
    if (deepspeed::is_pointer(file.name)) checkpoint.files.push_back(file);
  return checkpoint;
}

}  // namespace tessera
