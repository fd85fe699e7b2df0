// model/, optim/ and train/rank{r}.pt with FSDP1's flat parameters (checkpoint-rows F-05, O-70 to
// O-72).
#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "base/one_of.h"
#include "base/parallel.h"
#include "checkpoint/open/olmo_units.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/write/write_olmo.h"
#include "format/olmo/flat_param.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Kind = Value::Kind;
using olmo::FlatGeometry;

constexpr const char* kDefaultUnit = "(.*\\.)?blocks\\.[0-9]+";
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

UnitPlan plan_of(const ConvertJob& job, const std::vector<std::string>& names) {
  const std::string& unit = job.options.olmo.unit;
  if (unit.empty() && job.source.kind == CheckpointKind::olmo_local) {
    return UnitPlan::of_local(*job.source.store, names);
  }
  return UnitPlan::by_expression(names, unit.empty() ? kDefaultUnit : unit);
}

// A flat parameter has one type. Padding has a value, which types of 8 bits have no conversion for.
void require_flat_type(const FlatModel::Param& param, DType dtype) {
  const DType own = param.tensor->dtype;
  if (own == dtype && info(dtype).floating && can_cast(DType::float64, dtype)) return;
  throw Error(ErrorCode::unsupported,
              "a flat parameter holds one floating-point type of 16 bits or more, here are " +
                  std::string(to_string(dtype)) + " and " + std::string(to_string(own)))
      .at_key("model." + param.name);
}

void add_unit(FlatModel& model, const FlatUnit& unit, int ranks) {
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
  if (!shapes.empty()) model.layout.back().emplace(shapes, dtype, ranks, model.aligned);
}

FlatModel flat_model_of(const ConvertJob& job, const OlmoState& state) {
  FlatModel model;
  std::vector<std::string> names;
  for (const auto& [key, value] : state.model.pairs()) {
    if (!value.is(Kind::tensor)) {
      throw Error(ErrorCode::unsupported, "flat parameters hold tensors only, this is " +
                                              std::string("another value of the model"))
          .at_key("model." + key.as_string());
    }
    names.push_back(key.as_string());
    model.by_name.emplace(key.as_string(), model.params.size());
    model.params.push_back({key.as_string(), &value.as_tensor(), 0, 0});
  }
  model.plan = plan_of(job, names);
  model.aligned = job.options.olmo.orig_params.value_or(model.plan.aligned());
  for (const FlatUnit& unit : model.plan.units()) add_unit(model, unit, job.options.ranks);
  return model;
}

// What a rank's shard of a flat parameter is made of.
struct ShardContent {
  DType dtype;
  double fill;  // between parameters
  // What holds a parameter's elements; null: nothing, they are zeros.
  std::function<const Leaf*(const FlatModel::Param&)> source;
};

// A one-dimensional leaf of `archive`: the rank's shard of unit `unit`.
Value flat_shard(const FlatModel& model, std::size_t unit, int rank, const ShardContent& content,
                 Archive& archive) {
  const FlatGeometry& layout = *model.layout[unit];
  Value leaf = planned_tensor(content.dtype, Shape{layout.shard_size()});
  std::vector<ArchivePart> parts;
  for (const FlatGeometry::Segment& segment : layout.shard(rank)) {
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

void write_model(const ConvertJob& job, const FlatModel& model, const SourceTensors& sources,
                 int rank) {
  Archive archive{"model/rank" + std::to_string(rank) + ".pt", Value::dict(), {}};
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
    const Value data = flat_shard(model, u, rank, {model.dtype[u], model.fill(), source}, archive);
    modules.items().push_back(maker.module(name, fqns, shapes, *model.layout[u], rank, data));
  }
  archive.tree.set_item("modules", std::move(modules));
  write_archive(job, archive, 1);
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
  int rank;
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
    const std::vector<FlatGeometry::Segment> shard = model.layout[param.unit]->shard(rank);
    const auto segment = std::ranges::find(shard, param.index, &FlatGeometry::Segment::param);
    if (segment == shard.end()) return std::nullopt;
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
      own.set_item(key(name),
                   flat_shard(model, unit, rank, {first->as_tensor().dtype, 0, source}, archive));
      continue;
    }
    require_same(sources, name, holders);
    own.set_item(key(name), whole_entry(*first));
  }
  return own;
}

void write_optim(const ConvertJob& job, const FlatModel& model, const SourceTensors& sources,
                 const Value& optim, const Numbered& numbered, int rank) {
  const Value no_state = Value::dict();
  const Value* state = optim.find("state");
  OptimFile file{model, sources, state == nullptr ? no_state : *state, rank, {}, {}};
  file.archive.file = "optim/rank" + std::to_string(rank) + ".pt";
  Value by_number = Value::dict();
  for (const auto& [id, item] : numbered.numbers) {
    std::optional<Value> own =
        model.aligned ? file.of_param(model.params[item]) : file.of_unit(item);
    if (own) by_number.set_item(id, std::move(*own));
  }
  Value groups = with_tensors(numbered.groups, [&](const Tensor& tensor) {
    return whole_tensor(sources, tensor, file.archive);
  });
  file.archive.tree =
      Value::dict({{"state", std::move(by_number)}, {"param_groups", std::move(groups)}});
  write_archive(job, file.archive, 1);
}

void put_text(const ConvertJob& job, std::string_view name, const std::string& text) {
  put(job.store, name, {reinterpret_cast<const std::byte*>(text.data()), text.size()},
      job.if_exists);
}

}  // namespace

void write_olmo_local(ConvertJob& job, const OlmoState& state) {
  const FlatModel model = flat_model_of(job, state);
  const SourceTensors sources(state);
  std::optional<Numbered> numbered;
  if (state.optim) numbered = numbered_groups(model, state.optim->at("param_groups"));
  const int ranks = job.options.ranks;
  parallel_for(job.threads, static_cast<std::size_t>(ranks), [&](std::size_t index) {
    const auto rank = static_cast<int>(index);
    write_model(job, model, sources, rank);
    if (numbered) write_optim(job, model, sources, *state.optim, *numbered, rank);
    write_train(job, state, "train/rank" + std::to_string(rank) + ".pt");
  });
  put_text(job, "metadata.yaml", "world_size: " + std::to_string(ranks) + "\n");
}

}  // namespace tessera
