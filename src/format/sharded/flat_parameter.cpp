// FSDP1's flat parameters (checkpoint-rows F-05).
#include <algorithm>
#include <optional>

#include "base/numbers.h"
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

bool is_flat(const Tensor& tensor) {
  return !tensor.bare_storage && tensor.shape.size() == 1 && tensor.pieces.at(0).strides.empty();
}

const Tensor& data_of(const Value& handle) {
  const Value& value = of_handle(handle, "data");
  if (!value.is(Kind::tensor) || !is_flat(value.as_tensor())) {
    corrupt("flat_param.data is " + render(value, 60) + ", expected a flat tensor");
  }
  return value.as_tensor();
}

// `count` elements of `member` from its element `begin` on lie at `offset` of the shard.
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

// (in_shard, offset_in_shard, numel_in_shard, first, last)
const Value::List& fields_of(const Value& info) {
  const bool known = is_instance(info, "torch.distributed.fsdp", "_ShardParamInfo") &&
                     info.as_object().arguments.size() == 5;
  if (!known) corrupt("a shard's place is " + render(info, 80));
  const Value::List& fields = info.as_object().arguments.items();
  if (!fields[0].is(Kind::boolean)) corrupt("in_shard is " + render(fields[0], 60));
  return fields;
}

void place_by_info(const Value& info, FlatMember& member, const Tensor& data) {
  const Value::List& fields = fields_of(info);
  if (!fields[0].as_bool()) return;
  const std::int64_t offset = integer(fields[1], "offset_in_shard");
  const std::int64_t count = integer(fields[2], "numel_in_shard");
  const std::int64_t first = integer(fields[3], "intra_param_start_idx");
  const std::int64_t last = integer(fields[4], "intra_param_end_idx");
  if (checked_sub(last, first) != checked_sub(count, std::int64_t{1})) {
    corrupt("elements " + std::to_string(first) + " to " + std::to_string(last) + " are not " +
            std::to_string(count));
  }
  place(member, first, count, offset, data);
}

// torch from 2.1: a place for each parameter.
void place_by_infos(const Value& infos, std::vector<FlatMember>& members, const Tensor& data) {
  const Value::List& items = sequence(infos, "_shard_param_infos");
  if (items.size() != members.size()) corrupt("_shard_param_infos is not one a parameter");
  for (std::size_t i = 0; i < items.size(); ++i) place_by_info(items[i], members[i], data);
}

// Number of the shard's first parameter; `places` follow each other from there, of `count` in all.
std::size_t first_in_shard(const Value::List& indices, std::int64_t places, std::int64_t count) {
  if (indices.size() != 2) corrupt("_shard_indices is not a pair");
  const std::int64_t begin = integer(indices[0], "_shard_indices");
  if (begin < 0 || begin > count || places > count - begin) {
    corrupt("_shard_indices leave the parameters");
  }
  return static_cast<std::size_t>(begin);
}

// torch up to 2.0: the first parameter in the shard, and for each from there (first, last); their
// elements follow each other from the shard's start.
void place_by_offsets(const Value& handle, std::vector<FlatMember>& members, const Tensor& data) {
  const Value::List& indices = sequence(of_handle(handle, "_shard_indices"), "_shard_indices");
  const Value::List& offsets =
      sequence(of_handle(handle, "_shard_param_offsets"), "_shard_param_offsets");
  const std::size_t begin = first_in_shard(indices, std::ssize(offsets), std::ssize(members));
  std::int64_t at = 0;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const Value::List& pair = sequence(offsets[i], "_shard_param_offsets");
    if (pair.size() != 2) corrupt("_shard_param_offsets are not pairs");
    const std::int64_t first = integer(pair[0], "_shard_param_offsets");
    const std::int64_t size =
        checked_add(checked_sub(integer(pair[1], "_shard_param_offsets"), first), std::int64_t{1});
    place(members[begin + i], first, size, at, data);
    at += size;
  }
}

void require_padding(const Tensor& data, std::int64_t count) {
  if (count < 0 || count > data.shape[0]) {
    corrupt("_shard_numel_padded is " + std::to_string(count) + " of a shard of " +
            std::to_string(data.shape[0]));
  }
}

bool are_zeros(ByteView bytes) {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// Padding at the shard's end is zeros: anything else is part of a parameter that the places miss.
void require_zeros(const Tensor& data, std::int64_t count) {
  require_padding(data, count);
  constexpr std::uint64_t kWindow = 1 << 16;
  const std::size_t size = size_of(data.dtype);
  const Piece& piece = data.pieces[0];
  const auto end = static_cast<std::uint64_t>(piece.storage_offset + data.shape[0]) * size;
  std::uint64_t at = end - static_cast<std::uint64_t>(count) * size;
  while (at < end) {
    std::vector<std::byte> bytes(std::min(kWindow, end - at));
    piece.storage->source->read_at(piece.storage->offset + at, bytes);
    if (!are_zeros(bytes)) corrupt("the padding at the end of a flat parameter is not zero");
    at += bytes.size();
  }
}

FlatMember entry_of(const Value& name, const Value& sizes, const std::string& prefix) {
  if (!name.is(Kind::string)) corrupt("a parameter's name is " + render(name, 60));
  FlatMember member;
  member.name = prefix + clean_name(name.as_string());
  member.shape = shape(sizes, "_shapes");
  return member;
}

std::vector<FlatMember> members_of(const Value& handle, const std::string& prefix) {
  const Value::List& names = sequence(of_handle(handle, "_fqns"), "_fqns");
  const Value::List& shapes = sequence(of_handle(handle, "_shapes"), "_shapes");
  if (names.size() != shapes.size()) corrupt("_fqns and _shapes are not of one length");
  std::vector<FlatMember> members;
  for (std::size_t i = 0; i < names.size(); ++i)
    members.push_back(entry_of(names[i], shapes[i], prefix));
  return members;
}

void require_counts(const Value& counts, const std::vector<FlatMember>& members) {
  const bool same = std::ranges::equal(
      sequence(counts, "_numels"), members, {},
      [](const Value& item) { return integer(item, "_numels"); },
      [](const FlatMember& member) { return numel(member.shape); });
  if (!same) corrupt("_numels and _shapes contradict each other");
}

void place_entries(const Value& handle, std::vector<FlatMember>& members, const Tensor& data) {
  if (optional_of_handle(handle, "_shard_indices") != nullptr) {
    place_by_offsets(handle, members, data);
  } else {
    place_by_infos(of_handle(handle, "_shard_param_infos"), members, data);
  }
}

Value geometry_of(const Value& handle, const std::string& prefix, DType dtype) {
  std::vector<Value::Pair> geometry = {{"prefix", Value(prefix)},
                                       {"dtype", Value(std::string(to_string(dtype)))}};
  for (const std::string_view name : kGeometry) {
    if (const Value* value = optional_of_handle(handle, name)) {
      geometry.emplace_back(Value(std::string(name)), *value);
    }
  }
  return Value::dict(std::move(geometry));
}

FlatHandle read_handle(const Value& handle, const std::string& prefix) {
  FlatHandle made;
  made.data = data_of(handle);
  made.members = members_of(handle, prefix);
  if (const Value* counts = optional_of_handle(handle, "_numels"))
    require_counts(*counts, made.members);
  place_entries(handle, made.members, made.data);
  if (const Value* padded = optional_of_handle(handle, "_shard_numel_padded")) {
    require_zeros(made.data, integer(*padded, "_shard_numel_padded"));
  }
  made.geometry = geometry_of(handle, prefix, made.data.dtype);
  return made;
}

// The prefix of the names of a module's parameters. A wrapped module's own name ends with the
// wrapper's, without the dot.
std::string prefix_of(const std::string& module) {
  std::string prefix = clean_name(module + ".");
  if (prefix == ".") prefix.clear();
  return prefix;
}

void read_handles(const Value& module, const std::string& name, std::vector<FlatHandle>& handles) {
  const std::string prefix = prefix_of(name);
  for (const Value& handle : sequence(attribute(module, "handles"), "handles")) {
    try {
      handles.push_back(read_handle(handle, prefix));
      handles.back().module = prefix.substr(0, prefix.empty() ? 0 : prefix.size() - 1);
    } catch (Error& error) {
      throw error.at_key(printable(name));
    }
  }
}

}  // namespace

std::string clean_name(std::string name) {
  for (std::size_t at = name.find(kWrapper); at != std::string::npos;
       at = name.find(kWrapper, at)) {
    name.erase(at, kWrapper.size());
  }
  return name;
}

std::string wrapped_name(const std::string& name,
                         const std::function<bool(const std::string& module)>& is_wrapped) {
  std::string wrapped(is_wrapped("") ? kWrapper : "");
  std::size_t done = 0;
  for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    if (!is_wrapped(name.substr(0, dot))) continue;
    wrapped.append(name, done, dot + 1 - done).append(kWrapper);
    done = dot + 1;
  }
  return wrapped.append(name, done);
}

std::vector<FlatHandle> flat_handles(const Value& model) {
  std::vector<FlatHandle> handles;
  for (const Value& module : sequence(attribute(model, "modules"), "modules")) {
    const Value& name = attribute(module, "name");
    if (!name.is(Kind::string)) corrupt("a module's name is " + render(name, 60));
    read_handles(module, name.as_string(), handles);
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
