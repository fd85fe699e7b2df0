#include "checkpoint/open/deepspeed.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <span>

#include "base/numbers.h"
#include "base/parallel.h"
#include "base/text.h"
#include "comm/message.h"
#include "io/source.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera::deepspeed {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kModelEnd = "_model_states.pt", kOptimEnd = "_optim_states.pt";
constexpr std::string_view kDataRank = "zero_pp_rank_", kModelRank = "mp_rank_";

// What the name of a file says.
struct FileName {
  bool is_model = false;  // else of an optimizer
  int data_rank = -1;     // -1: of all
  int model_rank = 0;     // of tensor parallelism
};

// A number in a name, which may begin with zeros.
std::optional<int> take_number(std::string_view& text) {
  const std::size_t end = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::optional<int> number = padded_number(text.substr(0, end));
  text.remove_prefix(end);
  return number;
}

std::optional<FileName> parsed(std::string_view name) {
  FileName found;
  name.remove_prefix(name.rfind('/') + 1);  // npos + 1 is 0
  (void)(take_prefix(name, "bf16_") || take_prefix(name, "fp16_"));
  if (take_prefix(name, kDataRank)) {
    const auto rank = take_number(name);
    if (!rank || !take_prefix(name, "_")) return std::nullopt;
    found.data_rank = *rank;
  }
  if (!take_prefix(name, kModelRank)) return std::nullopt;
  const auto rank = take_number(name);
  if (!rank || (name != kModelEnd && name != kOptimEnd)) return std::nullopt;
  found.model_rank = *rank;
  found.is_model = name == kModelEnd;
  return found;
}

// Of pipelines and experts.
bool is_of_other_parallelism(std::string_view name) {
  name.remove_prefix(name.rfind('/') + 1);
  return name.ends_with(".pt") && (name.starts_with("layer_") || name.starts_with("expp_rank_"));
}

}  // namespace

void refuse(ErrorCode code, const std::string& what, const std::string& path) {
  throw Error(code, what).at_path(path);
}

bool is_file(std::string_view name) {
  return parsed(name).has_value();
}

std::optional<std::string> latest_of(const Store& store, const std::vector<ObjectInfo>& files) {
  constexpr std::uint64_t kMostBytes = 255;  // of a name
  const auto latest = std::ranges::find_if(files, is_pointer, &ObjectInfo::name);
  if (latest == files.end() || latest->size == 0 || latest->size > kMostBytes) return std::nullopt;
  std::string name = to_text(read_all(*store.open(latest->name), kMostBytes));
  while (name.ends_with('\n')) name.pop_back();
  if (name.empty() || name.front() == '.' ||
      name.find_first_of(std::string_view("/\0", 2)) != std::string::npos)
    return std::nullopt;
  return name;
}

Files files_of(const std::vector<ObjectInfo>& all, const std::string& where) {
  Files files;
  for (const ObjectInfo& file : all) {
    const auto name = parsed(file.name);
    if (is_of_other_parallelism(file.name) || (name && name->model_rank > 0)) {
      throw Error(ErrorCode::unsupported,
                  "a checkpoint of DeepSpeed with tensor, pipeline or expert parallelism, as '" +
                      printable(file.name, 200) +
                      "' says: its files do not say how tensors are cut")
          .at_path(where);
    }
    if (file.name.ends_with(kUniversalState)) files.universal = file;
    if (name) (name->is_model ? files.model : files.optim).emplace(name->data_rank, file);
  }
  return files;
}

// The parameters of a dict of names and sizes.
Group group_of(const Value& shapes, const std::string& path) {
  Group group;
  for (const auto& [key, size] : shapes.pairs()) {
    const std::optional<Shape> shape = size_from(size);
    if (!key.is(Kind::string) || !shape)
      refuse(ErrorCode::corrupt, "param_shapes has what is no size of a parameter", path);
    group.push_back({key.as_string(), *shape, numel(*shape)});
  }
  return group;
}

bool is_flat(const Value& value) {
  if (!value.is(Kind::tensor)) return false;
  const Tensor& tensor = value.as_tensor();
  return !tensor.bare_storage && tensor.shape.size() == 1 && tensor.pieces.size() == 1 &&
         tensor.pieces[0].strides.empty();
}

std::int64_t length_of(const Tensor& flat) {
  return flat.shape[0];
}

bool is_beside(const Value& state, const ZeroRank& rank, std::size_t array) {
  if (!is_flat(state)) return false;
  const std::int64_t more = length_of(state.as_tensor()) - length_of(rank.arrays[array]);
  if (more == 0) return true;
  const Value* paddings = find_entry_of_kind(rank.all, "group_paddings", Kind::list);
  return paddings != nullptr && array < paddings->size() && paddings->at(array).is(Kind::integer) &&
         more > 0 && more == paddings->at(array).as_int();
}

std::int64_t part_of_each(const Parameter& parameter, std::size_t world) {
  const auto ranks = static_cast<std::int64_t>(world);
  return parameter.elements / ranks + (parameter.elements % ranks == 0 ? 0 : 1);
}

FlatRange range_of_each(const Parameter& parameter, std::size_t world, std::size_t rank) {
  const std::int64_t part = part_of_each(parameter, world);
  const auto before = checked_mul(static_cast<std::int64_t>(rank), part);
  const auto begin = std::min(parameter.elements, before);
  return {begin, std::min(parameter.elements, checked_add(begin, part))};
}

namespace {

// Each file says of how many ranks it is.
void require_world(const ZeroRank& rank, std::size_t there) {
  const Value* count = find_entry(rank.all, "partition_count");
  if (count == nullptr) return;
  const auto require = [&](const Value& one) {
    if (!one.is(Kind::integer))
      refuse(ErrorCode::corrupt, "partition_count is no number", rank.path);
    const auto world = static_cast<std::int64_t>(there);
    if (one.as_int() == world) return;
    refuse(one.as_int() > world ? ErrorCode::incomplete : ErrorCode::conflict,
           "it is of " + std::to_string(one.as_int()) + " ranks, and there are files of " +
               std::to_string(world),
           rank.path);
  };
  if (!count->is(Kind::list)) return require(*count);
  for (const Value& one : count->items()) require(one);
}

void take_states(ZeroRank& rank) {
  const Value* base = find_entry(rank.all, "base_optimizer_state");
  if (base == nullptr) base = find_entry(rank.all, "optimizer_state_dict");
  rank.states.resize(rank.arrays.size());
  if (base == nullptr) return;
  if (!base->is(Kind::dict)) {
    refuse(ErrorCode::unsupported, "the optimizer's state is in the form of an elastic checkpoint",
           rank.path);
  }
  rank.param_groups = find_entry_of_kind(*base, "param_groups", Kind::list);
  const Value* states = find_entry_of_kind(*base, "state", Kind::dict);
  for (std::size_t i = 0; states != nullptr && i < rank.states.size(); ++i) {
    rank.states[i] = states->find_key(Value(static_cast<std::int64_t>(i)));
    if (rank.states[i] != nullptr && !rank.states[i]->is(Kind::dict))
      refuse(ErrorCode::corrupt, "the state of a group is no dict", rank.path);
  }
}

void take_arrays(ZeroRank& rank, std::size_t world) {
  const Value* all = find_entry_of_kind(rank.file, "optimizer_state_dict", Kind::dict);
  if (all == nullptr) refuse(ErrorCode::corrupt, "there is no optimizer_state_dict", rank.path);
  rank.all = *all;
  const Value* each = find_entry_of_kind(*all, "fp32_flat_groups", Kind::list);
  const Value* together = find_entry_of_kind(*all, "single_partition_of_fp32_groups", Kind::list);
  if ((each == nullptr) == (together == nullptr)) {
    refuse(ErrorCode::unsupported,
           "an optimizer of DeepSpeed without fp32 values of ZeRO 1, 2 or 3", rank.path);
  }
  rank.cuts_each = each != nullptr;
  require_world(rank, world);
  for (const Value& array : (each != nullptr ? each : together)->items()) {
    if (!is_flat(array))
      refuse(ErrorCode::corrupt, "the fp32 values of a group are no flat tensor", rank.path);
    rank.arrays.push_back(array.as_tensor());
  }
  if (rank.arrays.empty())
    refuse(ErrorCode::corrupt, "there are no groups of fp32 values", rank.path);
  take_states(rank);
}

[[noreturn]] void refuse_missing(int rank, int world, const std::string& where) {
  refuse(ErrorCode::incomplete,
         "of the files of " + std::to_string(world) + " ranks that of rank " +
             std::to_string(rank) + " is not there: *" + std::string(kDataRank) +
             std::to_string(rank) + "_*" + std::string(kOptimEnd),
         where);
}

}  // namespace

std::vector<ZeroRank> read_ranks(const RankStore& from, const Files& files) {
  const int world = files.optim.rbegin()->first + 1;
  for (int rank = 0; rank < world; ++rank)
    if (!files.optim.contains(rank)) refuse_missing(rank, world, from.store->name());
  std::vector<ZeroRank> ranks(static_cast<std::size_t>(world));
  parallel_for(kReaders, ranks.size(), [&](std::size_t rank) {
    const ObjectInfo& file = files.optim.at(static_cast<int>(rank));
    ranks[rank].path = from.store->name() + "/" + file.name;
    ranks[rank].file = read_rank_file(from, file);
    take_arrays(ranks[rank], ranks.size());
  });
  for (const ZeroRank& rank : ranks) {
    if (rank.cuts_each != ranks[0].cuts_each)
      refuse(ErrorCode::conflict, "ranks have files of different stages of ZeRO", rank.path);
  }
  return ranks;
}

namespace {

// Elements between each parameter of a group and the next one.
std::vector<std::int64_t> paddings_of(const ZeroRank& rank, std::size_t group,
                                      const Group& parameters) {
  std::vector<std::int64_t> paddings(parameters.size());
  const Value* given = find_entry_of_kind(rank.all, "param_alignment_paddings", Kind::list);
  if (given == nullptr) return paddings;
  const auto is_count = [](const Value& value) {
    return value.is(Kind::integer) && value.as_int() >= 0;
  };
  const bool is_known = group < given->size() && given->at(group).is(Kind::list) &&
                        given->at(group).size() == parameters.size() &&
                        std::ranges::all_of(given->at(group).items(), is_count);
  if (!is_known) {
    refuse(ErrorCode::corrupt, "param_alignment_paddings has not a number for each parameter",
           rank.path);
  }
  for (std::size_t i = 0; i < paddings.size(); ++i) paddings[i] = given->at(group).at(i).as_int();
  return paddings;
}

// The ranks' arrays of a group, end to end, are rounded up.
void require_length(const std::vector<ZeroRank>& ranks, std::size_t group, std::int64_t wanted) {
  std::int64_t there = 0;
  for (const ZeroRank& rank : ranks) there = checked_add(there, length_of(rank.arrays[group]));
  const auto unit = static_cast<std::int64_t>(2 * ranks.size());
  const auto rounded = [unit](std::int64_t elements) {
    return elements / unit + (elements % unit == 0 ? 0 : 1);
  };
  if (there >= wanted && rounded(there) == rounded(wanted)) return;
  refuse(ErrorCode::corrupt,
         "the ranks' fp32 values of group " + std::to_string(group) + " are " +
             std::to_string(there) + " elements, its parameters in param_shapes " +
             std::to_string(wanted),
         ranks[0].path);
}

// Newer files say for each parameter which of its elements the rank has, too: fragment_address with
// `numel` and `start`. What other files say has to be the same.
void require_mapping(const ZeroRank& rank, std::size_t group, const Group& parameters,
                     std::span<const Fragment> fragments) {
  const Value* mappings = find_entry_of_kind(rank.all, "param_slice_mappings", Kind::list);
  if (mappings == nullptr || group >= mappings->size()) return;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Value* given = find_entry_of_kind(mappings->at(group), parameters[i].name, Kind::object);
    if (given == nullptr || !given->as_object().state) continue;
    const Value* count = find_entry_of_kind(*given->as_object().state, "numel", Kind::integer);
    const Value* start = find_entry_of_kind(*given->as_object().state, "start", Kind::integer);
    const FlatRange& range = fragments[i].range;
    if (count == nullptr || start == nullptr ||
        (count->as_int() == range.end - range.begin && start->as_int() == fragments[i].at))
      continue;
    throw Error(ErrorCode::corrupt,
                "param_slice_mappings says that the rank has " + std::to_string(count->as_int()) +
                    " elements from " + std::to_string(start->as_int()) +
                    " on, param_shapes says " + std::to_string(range.end - range.begin) + " from " +
                    std::to_string(fragments[i].at) + " on")
        .at_key(printable(parameters[i].name))
        .at_path(rank.path);
  }
}

// ZeRO 1 and 2: the ranks' arrays of a group, end to end, have its parameters, each with the
// padding that the file says behind it.
void cut_together(const std::vector<ZeroRank>& ranks, const Group& parameters, std::size_t group,
                  std::vector<Fragments>& fragments) {
  const auto paddings = paddings_of(ranks[0], group, parameters);
  std::int64_t wanted = 0;
  std::vector<std::int64_t> starts;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    starts.push_back(wanted);
    wanted = checked_add(wanted, checked_add(parameters[i].elements, paddings[i]));
  }
  require_length(ranks, group, wanted);
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::int64_t end = begin + length_of(ranks[rank].arrays[group]);
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const std::int64_t first = std::max(begin, starts[i]);
      const std::int64_t last = std::min(end, starts[i] + parameters[i].elements);
      Fragment& fragment = fragments[rank].emplace_back(Fragment{{}, group, 0});
      if (first >= last) continue;
      fragment.range = {first - starts[i], last - starts[i]};
      fragment.at = first - begin;
    }
    begin = end;
    require_mapping(ranks[rank], group, parameters,
                    std::span(fragments[rank]).last(parameters.size()));
  }
}

[[noreturn]] void refuse_part(const ZeroRank& rank, const Parameter& parameter, std::int64_t part,
                              std::int64_t there) {
  throw Error(ErrorCode::corrupt, "a rank's part of the parameter is " + std::to_string(part) +
                                      " elements, and " + std::to_string(there) +
                                      " fp32 values are left")
      .at_key(printable(parameter.name))
      .at_path(rank.path);
}

// ZeRO 3: each rank has an equal part of each parameter, in the order of param_shapes; those of the
// last ranks may end in padding. Arrays follow each other; none of them ends inside of a part.
Fragments cut_each(const std::vector<ZeroRank>& ranks, const std::vector<Group>& groups,
                   std::size_t rank) {
  Fragments fragments;
  const std::vector<Tensor>& arrays = ranks[rank].arrays;
  std::size_t array = 0;
  std::int64_t at = 0;
  const auto left = [&] { return length_of(arrays[array]) - at; };
  const auto pass_ends = [&] {
    while (left() == 0 && array + 1 < arrays.size()) ++array, at = 0;
  };
  for (const Group& group : groups) {
    for (const Parameter& parameter : group) {
      const std::int64_t part = part_of_each(parameter, ranks.size());
      pass_ends();
      if (left() < part) refuse_part(ranks[rank], parameter, part, left());
      fragments.push_back({range_of_each(parameter, ranks.size(), rank), array, at});
      at += part;
    }
  }
  pass_ends();
  if (left() > 0) {
    refuse(ErrorCode::corrupt, "there are more fp32 values than param_shapes has elements",
           ranks[rank].path);
  }
  return fragments;
}

}  // namespace

std::vector<Fragments> fragments_of(const std::vector<ZeroRank>& ranks,
                                    const std::vector<Group>& groups) {
  std::vector<Fragments> fragments(ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].cuts_each) {
      fragments[rank] = cut_each(ranks, groups, rank);
    } else if (ranks[rank].arrays.size() != groups.size()) {
      refuse(ErrorCode::corrupt,
             "there are " + std::to_string(ranks[rank].arrays.size()) +
                 " groups of fp32 values, and " + std::to_string(groups.size()) +
                 " in param_shapes",
             ranks[rank].path);
    }
  }
  for (std::size_t group = 0; !ranks[0].cuts_each && group < groups.size(); ++group)
    cut_together(ranks, groups[group], group, fragments);
  return fragments;
}

}  // namespace tessera::deepspeed
