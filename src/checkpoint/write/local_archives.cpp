// The archives of a local checkpoint: FSDP1's flat parameters and their optimizer state
// (checkpoint-rows F-05, O-70 to O-72).
#include "checkpoint/write/local_archives.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "base/text.h"
#include "checkpoint/read/cast.h"
#include "format/olmo/flat_param.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Kind = Value::Kind;
using olmo::FlatGeometry;

constexpr double kAlignmentFill = 42;  // what FSDP puts between aligned parameters

// The state's parameters as flat parameters, the same for every rank.
struct FlatModel {
  struct Param {
    std::string name;
    const Tensor* tensor = nullptr;
    std::size_t unit = 0;
    std::size_t index = 0;  // in its unit
  };
  UnitPlan plan;
  bool aligned = true;
  std::vector<Param> params;                        // in the model's order
  std::map<std::string, std::size_t> by_name;       // index into params
  std::vector<std::vector<std::size_t>> of_unit;    // indices into params
  std::vector<std::optional<FlatGeometry>> layout;  // a unit's; none: it has no parameters
  std::vector<DType> dtype;                         // a unit's

  [[nodiscard]] double fill() const { return aligned ? kAlignmentFill : 0; }
  // The number of a unit's flat parameter: those that there are, in the order of modules.
  [[nodiscard]] std::int64_t flat_number(std::size_t unit) const {
    return std::count_if(layout.begin(), layout.begin() + static_cast<std::ptrdiff_t>(unit),
                         [](const auto& one) { return one.has_value(); });
  }
};

// A flat parameter has one type. Padding has a value, which types of 8 bits have no conversion for.
void require_flat_type(const FlatModel::Param& param, DType dtype) {
  const DType own = param.tensor->dtype;
  if (own == dtype && info(dtype).floating && can_cast(DType::float64, dtype)) return;
  throw Error(ErrorCode::unsupported,
              "a flat parameter holds one floating-point type of 16 bits or more, here are " +
                  std::string(to_string(dtype)) + " and " + std::string(to_string(own)))
      .at_key("model." + param.name);
}

void add_unit(FlatModel& model, const FlatUnit& unit, const FlatRules& rules) {
  std::vector<Shape> shapes;
  std::vector<std::size_t> indices;
  DType dtype = DType::float32;
  for (const std::string& name : unit.names) {
    FlatModel::Param& param = model.params[model.by_name.at(name)];
    if (shapes.empty()) dtype = param.tensor->dtype;
    require_flat_type(param, dtype);
    param.unit = model.of_unit.size();
    param.index = indices.size();
    indices.push_back(model.by_name.at(name));
    shapes.push_back(param.tensor->shape);
  }
  model.dtype.push_back(dtype);
  model.of_unit.push_back(std::move(indices));
  model.layout.emplace_back();
  if (shapes.empty()) return;
  model.layout.back().emplace(shapes, rules.aligned_as.value_or(dtype), rules.shards,
                              model.aligned);
}

FlatModel flat_model_of(const Value& state_dict, UnitPlan plan, const FlatRules& rules) {
  FlatModel model;
  model.plan = std::move(plan);
  model.aligned = rules.aligned;
  const std::vector<std::string> names = names_in_flat_model(state_dict);
  for (std::size_t i = 0; i < names.size(); ++i) {
    model.by_name.emplace(names[i], i);
    model.params.push_back({names[i], &state_dict.pairs()[i].second.as_tensor(), 0, 0});
  }
  for (const FlatUnit& unit : model.plan.units()) add_unit(model, unit, rules);
  return model;
}

// What a rank's shard of a flat parameter is made of.
struct ShardContent {
  DType dtype;
  double fill;  // between parameters
  // What holds a parameter's elements; null: nothing, they are zeros.
  std::function<const Leaf*(const FlatModel::Param&)> source;
};

// A one-dimensional leaf of `archive`: shard number `shard` of unit `unit`.
Value flat_shard(const FlatModel& model, std::size_t unit, int shard, const ShardContent& content,
                 Archive& archive) {
  const FlatGeometry& layout = *model.layout[unit];
  Value leaf = planned_tensor(content.dtype, Shape{layout.shard_size()});
  std::vector<ArchivePart> parts;
  for (const FlatGeometry::Segment& segment : layout.shard(shard)) {
    ArchivePart part{nullptr, FlatRange{}, content.fill, segment.count};
    if (segment.param != FlatGeometry::kPadding) {
      part.fill = 0;
      part.source = content.source(model.params[model.of_unit[unit][segment.param]]);
      part.slice = FlatRange{segment.begin, segment.begin + segment.count};
    }
    parts.push_back(std::move(part));
  }
  archive.parts.emplace(&leaf.as_tensor(), std::move(parts));
  return leaf;
}

Archive model_archive(const FlatModel& model, const SourceTensors& sources, std::string file,
                      int shard) {
  Archive archive{std::move(file), Value::dict(), {}};
  olmo::HandleMaker maker;
  Value modules = Value::list();
  for (std::size_t u = 0; u < model.of_unit.size(); ++u) {
    const FlatUnit& unit = model.plan.units()[u];
    const std::string name = model.plan.wrapped(unit.path);
    if (!model.layout[u]) {
      modules.items().push_back(maker.empty_module(name));
      continue;
    }
    std::vector<std::string> fqns;
    std::vector<Shape> shapes;
    for (const std::size_t p : model.of_unit[u]) {
      const std::size_t prefix = unit.path.empty() ? 0 : unit.path.size() + 1;
      fqns.push_back(model.params[p].name.substr(prefix));
      shapes.push_back(model.params[p].tensor->shape);
    }
    const auto source = [&](const FlatModel::Param& param) { return &sources.of(*param.tensor); };
    const Value data = flat_shard(model, u, shard, {model.dtype[u], model.fill(), source}, archive);
    modules.items().push_back(maker.module(name, fqns, shapes, *model.layout[u], shard, data));
  }
  archive.tree.set_item("modules", std::move(modules));
  return archive;
}

// The optimizer's parameters by number. Aligned, they count in the order of the groups; flat
// parameters count in the order of modules, which is what readers go by where groups have no names.
struct Numbered {
  Value groups;                                 // with numbers, and wrapped names
  std::map<std::int64_t, std::size_t> numbers;  // aligned: to indices into params, else into units
};

const FlatModel::Param& param_of(const FlatModel& model, const std::string& name) {
  const auto found = model.by_name.find(name);
  if (found == model.by_name.end()) {
    throw Error(ErrorCode::mismatch, "the optimizer has a parameter that the model lacks")
        .at_key("optim." + name);
  }
  return model.params[found->second];
}

// What the parameters of a group become: their numbers, in ascending order where they are flat.
std::map<std::int64_t, std::size_t> number_group(const FlatModel& model, const Value& group,
                                                 std::size_t first, std::set<std::size_t>& taken) {
  std::map<std::int64_t, std::size_t> numbers;
  std::set<std::size_t> in_group;
  for (const Value& name : group.at("params").items()) {
    const FlatModel::Param& param = param_of(model, name.as_string());
    const std::size_t item = model.aligned ? model.by_name.at(param.name) : param.unit;
    if (!model.aligned && in_group.contains(item)) continue;
    if (!taken.insert(item).second) {
      throw Error(ErrorCode::unsupported,
                  "parameters of one flat parameter are in two groups of the optimizer")
          .at_key("optim." + param.name);
    }
    in_group.insert(item);
    const auto next = static_cast<std::int64_t>(first + numbers.size());
    numbers.emplace(model.aligned ? next : model.flat_number(item), item);
  }
  return numbers;
}

// What PyTorch calls number `item` of what the optimizer has.
std::string name_in_group(const FlatModel& model, std::size_t item) {
  if (model.aligned) return model.plan.wrapped(model.params[item].name);
  const std::string& path = model.plan.units()[item].path;
  return model.plan.wrapped(path.empty() ? "_flat_param" : path + "._flat_param");
}

// The group with other parameters.
Value with_params(const FlatModel& model, const Value& group, const Value& ids,
                  const Value& names) {
  Value copy = Value::dict();
  for (const auto& [key, value] : group.pairs()) copy.set_item(key, value);
  copy.set_item("params", ids);
  // OLMo finds the parameters of a local checkpoint by their names.
  if (model.aligned || copy.find("param_names") != nullptr) copy.set_item("param_names", names);
  return copy;
}

Numbered numbered_groups(const FlatModel& model, const Value& groups) {
  Numbered result{Value::list(), {}};
  std::set<std::size_t> taken;
  for (const Value& group : groups.items()) {
    Value ids = Value::list();
    Value names = Value::list();
    const auto numbers = number_group(model, group, result.numbers.size(), taken);
    for (const auto& [id, item] : numbers) {
      ids.items().emplace_back(id);
      names.items().emplace_back(name_in_group(model, item));
    }
    result.numbers.insert(numbers.begin(), numbers.end());
    result.groups.items().push_back(with_params(model, group, ids, names));
  }
  return result;
}

// Whether FSDP splits this entry of a parameter's state: everything of the parameter's own shape.
bool is_sharded(const std::string& key, const Value& value, const Tensor& param) {
  if (!value.is(Kind::tensor)) return false;
  const Shape& shape = value.as_tensor().shape;
  if (shape == param.shape && (!shape.empty() || !is_one_of(key, "step", "grad_norm_exp_avg")))
    return true;
  if (shape.empty()) return false;
  throw Error(ErrorCode::unsupported, "optimizer state of shape " + to_string(shape) +
                                          " for a parameter of " + to_string(param.shape))
      .at_key(key);
}

// What a rank's file holds of one optimizer, while it is being put together.
struct OptimFile {
  const FlatModel& model;
  const SourceTensors& sources;
  const Value& state;  // by name
  int shard;
  Archive archive;
  std::map<std::string, Value> keys;  // "step", "exp_avg": one object each in Python

  // Entry -> the parameters that have it, by name.
  using Entries = std::vector<std::pair<std::string, std::map<std::string, const Value*>>>;
  [[nodiscard]] Entries entries_of(std::size_t unit) const;

  Value key(const std::string& name) { return keys.emplace(name, name).first->second; }

  // An entry that is not cut.
  Value whole_entry(const Value& value) {
    return value.is(Kind::tensor) ? whole_tensor(sources, value.as_tensor(), archive) : value;
  }

  // What a segment has of an entry.
  Value cut_entry(const Tensor& entry, const FlatGeometry::Segment& segment) {
    Value leaf = planned_tensor(entry.dtype, Shape{segment.count});
    const FlatRange range{segment.begin, segment.begin + segment.count};
    archive.parts.emplace(&leaf.as_tensor(),
                          std::vector{ArchivePart{&sources.of(entry), range, 0, segment.count}});
    return leaf;
  }

  // State of one parameter, cut to the elements that the rank has. None: it has none of them.
  std::optional<Value> of_param(const FlatModel::Param& param) {
    const Value* entries = state.find(param.name);
    if (entries == nullptr) return std::nullopt;
    const std::vector<FlatGeometry::Segment> segments = model.layout[param.unit]->shard(shard);
    const auto segment = std::ranges::find(segments, param.index, &FlatGeometry::Segment::param);
    if (segment == segments.end()) return std::nullopt;
    Value own = Value::dict();
    for (const auto& [name, value] : entries->pairs()) {
      const std::string& text = name.as_string();
      const bool cut = is_sharded(text, value, *param.tensor);
      own.set_item(key(text), cut ? cut_entry(value.as_tensor(), *segment) : whole_entry(value));
    }
    return own;
  }

  // State of a whole flat parameter. None: no parameter in it has any.
  std::optional<Value> of_unit(std::size_t unit);
};

std::vector<std::byte> bytes_of(const Leaf& leaf) {
  const Tensor& tensor = leaf.value.as_tensor();
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel(tensor.shape)) *
                               size_of(tensor.dtype));
  TensorReader(tensor, leaf.name).read(whole(tensor.shape), 0, numel(tensor.shape), bytes.data());
  return bytes;
}

bool same_value(const SourceTensors& sources, const Value& a, const Value& b) {
  if (!a.is(Kind::tensor) || !b.is(Kind::tensor)) return a == b;
  return a.as_tensor().dtype == b.as_tensor().dtype &&
         bytes_of(sources.of(a.as_tensor())) == bytes_of(sources.of(b.as_tensor()));
}

// What is not cut has one value for all parameters of a flat one.
void require_same(const SourceTensors& sources, const std::string& name,
                  const std::map<std::string, const Value*>& holders) {
  const Value& first = *holders.begin()->second;
  for (const auto& [param, value] : holders) {
    if (same_value(sources, first, *value)) continue;
    throw Error(ErrorCode::mismatch, "parameters of one flat parameter differ in '" + name +
                                         "' of their optimizer state")
        .at_key("optim.state." + param);
  }
}

// What is cut lies end to end with that of the other parameters.
DType common_type(const FlatModel& model, const std::string& name,
                  const std::map<std::string, const Value*>& holders) {
  const DType dtype = holders.begin()->second->as_tensor().dtype;
  for (const auto& [param, value] : holders) {
    if (is_sharded(name, *value, *param_of(model, param).tensor) &&
        value->as_tensor().dtype == dtype)
      continue;
    throw Error(ErrorCode::unsupported, "of parameters of one flat parameter the optimizer has '" +
                                            name + "' in several types")
        .at_key("optim.state." + param);
  }
  return dtype;
}

OptimFile::Entries OptimFile::entries_of(std::size_t unit) const {
  Entries entries;
  for (const std::size_t p : model.of_unit[unit]) {
    const FlatModel::Param& param = model.params[p];
    const Value* own = state.find(param.name);
    if (own == nullptr) continue;
    for (const auto& pair : own->pairs()) {
      const std::string& name = pair.first.as_string();
      auto found = std::ranges::find(entries, name, &Entries::value_type::first);
      if (found == entries.end()) found = entries.insert(entries.end(), {name, {}});
      found->second.emplace(param.name, &pair.second);
    }
  }
  return entries;
}

std::optional<Value> OptimFile::of_unit(std::size_t unit) {
  const Entries entries = entries_of(unit);
  if (entries.empty()) return std::nullopt;
  Value own = Value::dict();
  for (const auto& [name, holders] : entries) {
    const auto& [first_name, first] = *holders.begin();
    if (is_sharded(name, *first, *param_of(model, first_name).tensor)) {
      const auto source = [&, &by_name = holders](const FlatModel::Param& param) -> const Leaf* {
        const auto found = by_name.find(param.name);
        return found == by_name.end() ? nullptr : &sources.of(found->second->as_tensor());
      };
      const ShardContent content{common_type(model, name, holders), 0, source};
      own.set_item(key(name), flat_shard(model, unit, shard, content, archive));
      continue;
    }
    require_same(sources, name, holders);
    own.set_item(key(name), whole_entry(*first));
  }
  return own;
}

}  // namespace

std::vector<std::string> names_in_flat_model(const Value& state_dict) {
  std::vector<std::string> names;
  for (const auto& [key, value] : state_dict.pairs()) {
    if (!value.is(Kind::tensor)) {
      throw Error(ErrorCode::unsupported, "flat parameters hold tensors only, this is " +
                                              std::string("another value of the model"))
          .at_key("model." + key.as_string());
    }
    names.push_back(key.as_string());
  }
  return names;
}

struct LocalArchives::Plan {
  FlatModel model;
  std::optional<Numbered> numbered;
};

LocalArchives::LocalArchives(const OlmoState& state, const SourceTensors& sources, UnitPlan plan,
                             const FlatRules& rules)
    : state_(state), sources_(sources), plan_(std::make_unique<Plan>()) {
  plan_->model = flat_model_of(state.model, std::move(plan), rules);
  if (state.optim) plan_->numbered = numbered_groups(plan_->model, state.optim->at("param_groups"));
}

LocalArchives::~LocalArchives() = default;

Archive LocalArchives::model(std::string file, int shard) const {
  return model_archive(plan_->model, sources_, std::move(file), shard);
}

Archive LocalArchives::optim(std::string file, int shard) const {
  const FlatModel& model = plan_->model;
  const Value no_state = Value::dict();
  const Value* state = state_.optim->find("state");
  OptimFile made{model, sources_, state == nullptr ? no_state : *state, shard, {}, {}};
  made.archive.file = std::move(file);
  Value by_number = Value::dict();
  for (const auto& [id, item] : plan_->numbered->numbers) {
    std::optional<Value> own =
        model.aligned ? made.of_param(model.params[item]) : made.of_unit(item);
    if (own) by_number.set_item(id, std::move(*own));
  }
  Value groups = with_tensors(plan_->numbered->groups, [&](const Tensor& tensor) {
    return whole_tensor(sources_, tensor, made.archive);
  });
  made.archive.tree =
      Value::dict({{"state", std::move(by_number)}, {"param_groups", std::move(groups)}});
  return std::move(made.archive);
}

}  // namespace tessera
