// FSDP1's flat parameters (F-05).
#include <algorithm>
#include <optional>

#include "base/checked.h"
#include "format/sharded/attributes.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kWrapper = "_fsdp_wrapped_module.";
constexpr std::string_view kPrefix = "flat_param.";
// The attributes that are the same on all ranks.
constexpr std::string_view kGeometry[] = {"_fqns", "_shapes", "_numels", "_numels_with_padding"};

const Value& of_handle(const Value& handle, std::string_view name) {
  return attribute(handle, std::string(kPrefix) + std::string(name));
}

const Value* optional_of_handle(const Value& handle, std::string_view name) {
  return optional_attribute(handle, std::string(kPrefix) + std::string(name));
}

const Tensor& data_of(const Value& handle) {
  const Value& value = of_handle(handle, "data");
  const bool flat = value.is(Kind::tensor) && !value.as_tensor().bare_storage &&
                    value.as_tensor().shape.size() == 1 &&
                    value.as_tensor().pieces.at(0).strides.empty();
  if (!flat) corrupt("flat_param.data is " + render(value, 60) + ", expected a flat tensor");
  return value.as_tensor();
}

// `count` elements of `entry` from its element `begin` on lie at `offset` of the shard.
void place(FlatMember& member, std::int64_t begin, std::int64_t count, std::int64_t offset,
           const Tensor& data) {
  const bool fits = begin >= 0 && count > 0 && offset >= 0 &&
                    checked_add(begin, count) <= numel(member.shape) &&
                    checked_add(offset, count) <= data.shape[0];
  if (!fits) {
    corrupt(std::to_string(count) + " elements of '" + printable(member.name, 200) + "' " +
            to_string(member.shape) + " from " + std::to_string(begin) + " on, at " +
            std::to_string(offset) + " of a shard of " + std::to_string(data.shape[0]) +
            ", lie outside of one of them");
  }
  member.range = {begin, begin + count};
  member.base = offset;
}

// torch from 2.1: (in_shard, offset_in_shard, numel_in_shard, first, last) a parameter.
void place_by_infos(const Value& infos, std::vector<FlatMember>& members, const Tensor& data) {
  const Value::List& items = sequence(infos, "_shard_param_infos");
  if (items.size() != members.size()) corrupt("_shard_param_infos is not one a parameter");
  for (std::size_t i = 0; i < items.size(); ++i) {
    const bool known = is_instance(items[i], "torch.distributed.fsdp", "_ShardParamInfo") &&
                       items[i].as_object().arguments.size() == 5;
    if (!known) corrupt("a shard's place is " + render(items[i], 80));
    const Value::List& fields = items[i].as_object().arguments.items();
    if (!fields[0].is(Kind::boolean)) corrupt("in_shard is " + render(fields[0], 60));
    if (!fields[0].as_bool()) continue;
    const std::int64_t offset = integer(fields[1], "offset_in_shard");
    const std::int64_t count = integer(fields[2], "numel_in_shard");
    const std::int64_t first = integer(fields[3], "intra_param_start_idx");
    const std::int64_t last = integer(fields[4], "intra_param_end_idx");
    if (checked_sub(last, first) != checked_sub(count, std::int64_t{1})) {
      corrupt("elements " + std::to_string(first) + " to " + std::to_string(last) + " are not " +
              std::to_string(count));
    }
    place(members[i], first, count, offset, data);
  }
}

// torch up to 2.0: the first parameter in the shard, and for each from there (first, last); their
// elements follow each other from the shard's start.
void place_by_offsets(const Value& handle, std::vector<FlatMember>& members, const Tensor& data) {
  const Value::List& indices = sequence(of_handle(handle, "_shard_indices"), "_shard_indices");
  const Value::List& offsets =
      sequence(of_handle(handle, "_shard_param_offsets"), "_shard_param_offsets");
  if (indices.size() != 2) corrupt("_shard_indices is not a pair");
  const std::int64_t begin = integer(indices[0], "_shard_indices");
  const auto count = static_cast<std::int64_t>(members.size());
  if (begin < 0 || begin > count || std::ssize(offsets) > count - begin) {
    corrupt("_shard_indices leave the parameters");
  }
  std::int64_t at = 0;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const Value::List& pair = sequence(offsets[i], "_shard_param_offsets");
    if (pair.size() != 2) corrupt("_shard_param_offsets are not pairs");
    const std::int64_t first = integer(pair[0], "_shard_param_offsets");
    const std::int64_t size =
        checked_add(checked_sub(integer(pair[1], "_shard_param_offsets"), first), std::int64_t{1});
    place(members[static_cast<std::size_t>(begin) + i], first, size, at, data);
    at += size;
  }
}

// Padding at the shard's end is zeros: anything else is part of a parameter that the places miss.
void require_zeros(const Tensor& data, std::int64_t count) {
  if (count < 0 || count > data.shape[0]) {
    corrupt("_shard_numel_padded is " + std::to_string(count) + " of a shard of " +
            std::to_string(data.shape[0]));
  }
  constexpr std::uint64_t kWindow = 1 << 16;
  const std::size_t size = size_of(data.dtype);
  const Piece& piece = data.pieces[0];
  const auto end = static_cast<std::uint64_t>(piece.storage_offset + data.shape[0]) * size;
  std::uint64_t at = end - static_cast<std::uint64_t>(count) * size;
  while (at < end) {
    std::vector<std::byte> bytes(std::min(kWindow, end - at));
    piece.storage->source->read_at(piece.storage->offset + at, bytes);
    const bool zero = std::all_of(bytes.begin(), bytes.end(),
                                  [](std::byte byte) { return byte == std::byte{0}; });
    if (!zero) corrupt("the padding at the end of a flat parameter is not zero");
    at += bytes.size();
  }
}

std::vector<FlatMember> members_of(const Value& handle, const std::string& prefix) {
  const Value::List& names = sequence(of_handle(handle, "_fqns"), "_fqns");
  const Value::List& shapes = sequence(of_handle(handle, "_shapes"), "_shapes");
  if (names.size() != shapes.size()) corrupt("_fqns and _shapes are not of one length");
  std::vector<FlatMember> members;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!names[i].is(Kind::string)) corrupt("a parameter's name is " + render(names[i], 60));
    FlatMember member;
    member.name = prefix + clean_name(names[i].as_string());
    member.shape = shape(shapes[i], "_shapes");
    members.push_back(std::move(member));
  }
  return members;
}

void require_counts(const Value& counts, const std::vector<FlatMember>& members) {
  const Value::List& items = sequence(counts, "_numels");
  bool same = items.size() == members.size();
  for (std::size_t i = 0; same && i < items.size(); ++i) {
    same = integer(items[i], "_numels") == numel(members[i].shape);
  }
  if (!same) corrupt("_numels and _shapes contradict each other");
}

FlatHandle read_handle(const Value& handle, const std::string& prefix) {
  FlatHandle made;
  made.data = data_of(handle);
  made.members = members_of(handle, prefix);
  if (const Value* counts = optional_of_handle(handle, "_numels"))
    require_counts(*counts, made.members);
  if (optional_of_handle(handle, "_shard_indices") != nullptr) {
    place_by_offsets(handle, made.members, made.data);
  } else {
    place_by_infos(of_handle(handle, "_shard_param_infos"), made.members, made.data);
  }
  if (const Value* padded = optional_of_handle(handle, "_shard_numel_padded")) {
    require_zeros(made.data, integer(*padded, "_shard_numel_padded"));
  }
  std::vector<Value::Pair> geometry = {{"prefix", Value(prefix)},
                                       {"dtype", Value(std::string(to_string(made.data.dtype)))}};
  for (const std::string_view name : kGeometry) {
    if (const Value* value = optional_of_handle(handle, name)) {
      geometry.emplace_back(Value(std::string(name)), *value);
    }
  }
  made.geometry = Value::dict(std::move(geometry));
  return made;
}

}  // namespace

std::string clean_name(std::string name) {
  for (std::size_t at = name.find(kWrapper); at != std::string::npos;
       at = name.find(kWrapper, at)) {
    name.erase(at, kWrapper.size());
  }
  return name;
}

std::vector<FlatHandle> flat_handles(const Value& model) {
  std::vector<FlatHandle> handles;
  for (const Value& module : sequence(attribute(model, "modules"), "modules")) {
    const Value& name = attribute(module, "name");
    if (!name.is(Kind::string)) corrupt("a module's name is " + render(name, 60));
    // A wrapped module's own name ends with the wrapper's, without the dot.
    std::string prefix = clean_name(name.as_string() + ".");
    if (prefix == ".") prefix.clear();
    for (const Value& handle : sequence(attribute(module, "handles"), "handles")) {
      try {
        handles.push_back(read_handle(handle, prefix));
        handles.back().module = prefix.substr(0, prefix.empty() ? 0 : prefix.size() - 1);
      } catch (Error& error) {
        throw error.at_key(printable(name.as_string()));
      }
    }
  }
  return handles;
}

Piece flat_piece(const Tensor& data, const FlatRange& range, std::int64_t offset, int rank) {
  Piece piece = data.pieces.at(0);
  piece.slice = range;
  piece.storage_offset = checked_add(piece.storage_offset, offset);
  piece.rank = rank;
  return piece;
}

}  // namespace tessera::sharded
