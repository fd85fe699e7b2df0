#include "checkpoint/open/item_files.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/text.h"
#include "checkpoint/open/rank_files.h"
#include "format/pickle/pickle.h"
#include "format/safetensors/json.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::uint64_t kItemsMetadataLimit = std::uint64_t{1} << 30;  // bytes
constexpr std::string_view kItemsVersion = "2.0";
constexpr std::string_view kItemEnd = ".pt";

// ITEM of "ITEM_3.pt"; empty: the name is another one.
std::string_view item_of(std::string_view name) {
  if (!name.ends_with(kItemEnd)) return {};
  name.remove_suffix(kItemEnd.size());
  const std::size_t at = name.rfind('_');
  if (at == std::string_view::npos || name.find('/') != std::string_view::npos) return {};
  return plain_number(name.substr(at + 1)) ? name.substr(0, at) : std::string_view();
}

[[noreturn]] void refuse_metadata(ErrorCode code, const std::string& what) {
  throw Error(code, std::string(kItemsMetadata) + " " + what);
}

const Value& required(const Value& of, std::string_view key, Kind kind) {
  const Value* const found = find_entry_of_kind(of, key, kind);
  if (found == nullptr)
    refuse_metadata(ErrorCode::unsupported,
                    "is not as torch_checkpointing writes it: no " + std::string(key));
  return *found;
}

// What metadata.pkl says.
struct ItemsMetadata {
  Value items;  // a dict
  int world = 0;
};

ItemsMetadata read_metadata(const Store& store) {
  const auto source = store.open(kItemsMetadata);
  const Value all = pickle::read(read_all(*source, kItemsMetadataLimit)).value;
  const std::string& version = required(all, "version", Kind::string).as_string();
  if (version != kItemsVersion)
    refuse_metadata(ErrorCode::unsupported, "is of version " + printable(version, 60));
  const std::int64_t world = required(all, "world_size", Kind::integer).as_int();
  if (world < 1 || world >= kNumberBound)
    refuse_metadata(ErrorCode::corrupt, "is of " + std::to_string(world) + " ranks");
  return {required(all, "metadata", Kind::dict), static_cast<int>(world)};
}

void require_usual_names(const std::string& item, const Value& described) {
  for (const auto& [rank, layout] :
       required(described, "rank_to_layout_info", Kind::dict).pairs()) {
    if (layout.is(Kind::none)) continue;
    refuse_metadata(ErrorCode::unsupported,
                    "says that " + printable(item, 200) + " lies in files of other names");
  }
}

using FilesByItem = std::map<std::string, std::vector<ObjectInfo>, std::less<>>;

// Of each item the files of all ranks, in their order.
FilesByItem files_by_item(const std::vector<ObjectInfo>& all, const ItemsMetadata& metadata,
                          const std::string& where) {
  FilesByItem files;
  for (const ObjectInfo& file : all) {
    if (const std::string_view item = item_of(file.name); !item.empty())
      files.try_emplace(std::string(item));
  }
  for (const auto& [key, described] : metadata.items.pairs()) {
    require_usual_names(key_text(key), described);
    files.try_emplace(key_text(key));
  }
  for (auto& [item, ranks] : files) {
    const std::string prefix = item + "_";
    try {
      ranks = rank_files(all, prefix, where);
      if (std::ssize(ranks) == metadata.world) continue;
      const bool lacks = std::ssize(ranks) < metadata.world;
      throw Error(lacks ? ErrorCode::incomplete : ErrorCode::corrupt,
                  "there are " + std::to_string(ranks.size()) + " files of " +
                      printable(item, 200) + ", for " + std::to_string(metadata.world) + " ranks")
          .at_path(where);
    } catch (const Error& error) {
      rethrow_with_missing(error, all, prefix, metadata.world);
    }
  }
  return files;
}

// A way inside of an item as the metadata's keys have it: JSON of a list. None: no key is so.
std::optional<std::string> text_of_way(const Path& path) {
  std::string text;
  for (std::size_t i = 1; i < path.size(); ++i) {
    text += i > 1 ? "," : "";
    const std::optional<Value> key = key_of_step(path[i]);
    if (!key) {
      text += std::to_string(std::get<std::int64_t>(path[i]));
    } else if (key->is(Kind::string)) {
      safetensors::append_json(text, key->as_string(), safetensors::JsonText::ascii);
    } else if (key->is(Kind::integer)) {
      text += key_text(*key);
    } else {
      return std::nullopt;
    }
  }
  return "[" + text + "]";
}

// What Python writes of a shape: a list of ints.
bool is_shape(const Value& value, const Shape& shape) {
  if (!value.is(Kind::list)) return false;
  return std::ranges::equal(value.items(), shape, [](const Value& size, std::int64_t wanted) {
    return size.is(Kind::integer) && size.as_int() == wanted;
  });
}

void require_agreement(const Value& group, const Leaf& leaf, std::set<std::int64_t>& ranks) {
  const Tensor& tensor = leaf.value.as_tensor();
  for (const Value& rank : required(group, "ranks", Kind::tuple).items())
    if (rank.is(Kind::integer)) ranks.insert(rank.as_int());
  const Value& sharding = required(group, "sharding_metadata", Kind::dict);
  // Others may describe what is no DTensor, in ways of their own.
  if (required(sharding, "type", Kind::string).as_string() != "DTensorShardingMetadata") return;
  const Value& data = required(sharding, "data", Kind::dict);
  const Value& shape = required(data, "global_shape", Kind::list);
  const std::string& dtype = required(data, "dtype", Kind::string).as_string();
  if (is_shape(shape, tensor.shape) && dtype == "torch." + std::string(to_string(tensor.dtype)))
    return;
  refuse_metadata(ErrorCode::corrupt,
                  "has " + printable(dtype, 60) + " " + render(shape, 60) + ", the files have " +
                      std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape));
}

void require_agreement(const Value& groups, const Leaf& leaf) {
  std::set<std::int64_t> ranks;
  if (!groups.is(Kind::list)) refuse_metadata(ErrorCode::corrupt, "has no list of it");
  for (const Value& group : groups.items()) require_agreement(group, leaf, ranks);
  for (const Piece& piece : leaf.value.as_tensor().pieces) {
    if (piece.rank < 0 || ranks.contains(piece.rank)) continue;
    refuse_metadata(ErrorCode::corrupt, "does not have it on rank " + std::to_string(piece.rank));
  }
}

// Each sharded tensor of an item that the metadata describes has its entry there, and each entry
// its tensor.
void require_agreement(const ItemsMetadata& metadata, const std::vector<Leaf>& leaves) {
  std::map<std::string, std::size_t> entries, found;
  for (const auto& [key, described] : metadata.items.pairs())
    entries[key_text(key)] = required(described, "nested_path_to_metadata", Kind::dict).size();
  for (const Leaf& leaf : leaves) {
    const std::string item = leaf.path.empty() ? "" : step_text(leaf.path.front());
    const Value* const described = find_entry(metadata.items, item);
    if (described == nullptr || !leaf.value.is(Kind::tensor)) continue;
    const std::optional<std::string> way = text_of_way(leaf.path);
    const Value& ways = required(*described, "nested_path_to_metadata", Kind::dict);
    const Value* const groups = way ? ways.find(*way) : nullptr;
    try {
      if (groups != nullptr) {
        require_agreement(*groups, leaf);
        ++found[item];
      } else if (leaf.value.as_tensor().sharded) {
        refuse_metadata(ErrorCode::corrupt, "does not have it");
      }
    } catch (Error& error) {
      throw error.at_key(leaf.name);
    }
  }
  for (const auto& [item, count] : entries) {
    if (found[item] == count) continue;
    refuse_metadata(ErrorCode::corrupt, "has " + std::to_string(count) + " tensors of " +
                                            printable(item, 200) + ", the files have " +
                                            std::to_string(found[item]) + " of them");
  }
}

// The errors of `read`, with the metadata's path where they have none.
template <typename Read>
auto at_metadata(const Store& store, const Read& read) {
  try {
    return read();
  } catch (Error& error) {
    if (error.path().empty()) error.at_path(store.name() + "/" + std::string(kItemsMetadata));
    throw error;
  }
}

}  // namespace

std::vector<std::string_view> item_files(const std::vector<ObjectInfo>& files) {
  std::vector<std::string_view> names;
  bool has_metadata = false;
  for (const ObjectInfo& file : files) {
    const bool is_metadata = file.name == kItemsMetadata;
    has_metadata = has_metadata || is_metadata;
    if (is_metadata || !item_of(file.name).empty()) names.emplace_back(file.name);
  }
  if (!has_metadata || names.size() < 2) names.clear();
  return names;
}

bool has_item_files(const std::vector<ObjectInfo>& files) {
  return !item_files(files).empty();
}

Checkpoint open_item_files(const std::shared_ptr<Store>& store,
                           const std::vector<ObjectInfo>& all) {
  const ItemsMetadata metadata = at_metadata(*store, [&] { return read_metadata(*store); });
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::rank_files;
  checkpoint.path = store->name();
  checkpoint.store = store;
  checkpoint.world_size = metadata.world;
  checkpoint.producer = "torch_checkpointing";
  const FilesByItem files =
      at_metadata(*store, [&] { return files_by_item(all, metadata, store->name()); });
  for (const auto& [item, ranks] : files)
    checkpoint.files.insert(checkpoint.files.end(), ranks.begin(), ranks.end());
  checkpoint.files.push_back(*std::ranges::find(all, kItemsMetadata, &ObjectInfo::name));
  const RankStore from{store};
  merge_ranks(checkpoint, metadata.world, [&](int rank) {
    Value tree = Value::dict();
    for (const auto& [item, ranks] : files) {
      tree.set_item(Value(item), resolved_rank_file(from, ranks[static_cast<std::size_t>(rank)],
                                                    {rank, metadata.world}));
    }
    return tree;
  });
  at_metadata(*store, [&] { require_agreement(metadata, checkpoint.leaves); });
  return checkpoint;
}

}  // namespace tessera
