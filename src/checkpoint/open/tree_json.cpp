#include "checkpoint/open/tree_json.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/open/value_json.h"
#include "checkpoint/read/missing.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

// The version of the entry's schema. Readers of version 1 ignore members that they do not know; an
// entry with something that they would misread has version 2.
constexpr int kVersion = 1;
constexpr int kNewestVersion = 2;
constexpr int kMaxDepth =
    4096;  // of the JSON: containers are at most 1000 deep, each two of its own

constexpr DictKind kDictKinds[] = {DictKind::dict, DictKind::ordered_dict, DictKind::default_dict};

// Leaves of a tree; the others are tensors inside of them.
bool is_in_tree(const Leaf& leaf) {
  return !leaf.path.empty() || leaf.name.empty();
}

bool has_odd_key(const Path& path) {
  return std::any_of(path.begin(), path.end(),
                     [](const PathPart& part) { return std::holds_alternative<DictKey>(part); });
}

void append_name(JsonWriter& json, const std::string& name) {
  json.key("name");
  json.text(name);
}

void append_path_member(JsonWriter& json, const Path& path) {
  json.key("path");
  append_path(json, path);
}

void append_true(JsonWriter& json, std::string_view key) {
  json.key(key);
  json.raw("true");
}

void append_member(JsonWriter& json, std::string_view key, const Value& value,
                   const TensorNames& names = {}) {
  json.key(key);
  append_value(json, value, names);
}

// Members of an object.
void append_container(JsonWriter& json, const Container& container) {
  json.key("kind");
  json.text(std::string(type_name(container.kind)));
  if (container.state) append_member(json, "state", *container.state);
  if (container.default_factory) append_member(json, "factory", *container.default_factory);
}

DictKind kind_named(const std::string& name) {
  const auto* found = std::ranges::find(kDictKinds, name, type_name);
  if (found == std::end(kDictKinds))
    throw Error(ErrorCode::corrupt, "unknown kind of a container: '" + name + "'");
  return *found;
}

std::shared_ptr<const Container> decode_container(const Json& item) {
  Container container;
  container.kind = kind_named(item.at("kind").get<std::string>());
  if (item.contains("state")) container.state = decode_value(item.at("state"));
  if (item.contains("factory")) container.default_factory = decode_value(item.at("factory"));
  return std::make_shared<const Container>(std::move(container));
}

// Paths are compared by their JSON.
std::string key_of(const Json& path) {
  return path.dump(-1, ' ', true, Json::error_handler_t::replace);
}
std::string key_of(std::span<const PathPart> path, BadText bad_text) {
  JsonWriter json(bad_text);
  append_path(json, path);
  return json.take();
}

// Those around a leaf whose paths are not `known` yet.
void append_around(JsonWriter& json, const Leaf& leaf, std::unordered_set<std::string>& known) {
  const std::size_t depth = std::min(leaf.containers->size(), leaf.path.size());
  for (std::size_t step = 0; step < depth; ++step) {
    const Container* container = (*leaf.containers)[step].get();
    if (container == nullptr) continue;
    const auto path = known.insert(key_of(std::span(leaf.path).first(step), BadText::refuse));
    if (!path.second) continue;
    json.begin('{');
    json.key("path");
    json.raw(*path.first);
    append_container(json, *container);
    json.end('}');
  }
}

// A member with the dicts that are more than plain ones, each by its path.
void append_containers(JsonWriter& json, const std::vector<Leaf>& leaves) {
  std::unordered_set<const Containers*> met;
  std::unordered_set<std::string> known;
  json.key("containers");
  json.begin('[');
  for (const Leaf& leaf : leaves) {
    if (leaf.containers && met.insert(leaf.containers.get()).second)
      append_around(json, leaf, known);
  }
  json.end(']');
}

using ContainersByWay = std::unordered_map<std::string, std::shared_ptr<const Container>>;

// The containers on the way to a leaf, the outermost first; null when none of them is known.
std::shared_ptr<const Containers> containers_on(std::span<const PathPart> way,
                                                const ContainersByWay& known) {
  Containers containers(way.size() + 1);
  bool plain = true;
  for (std::size_t step = 0; step < containers.size(); ++step) {
    const auto found = known.find(key_of(way.first(step), BadText::replace));
    if (found == known.end()) continue;
    containers[step] = found->second;
    plain = false;
  }
  return plain ? nullptr : std::make_shared<const Containers>(std::move(containers));
}

ContainersByWay decode_containers(const Json& list) {
  ContainersByWay known;
  for (const Json& item : list) known[key_of(item.at("path"))] = decode_container(item);
  return known;
}

void add_containers(const Json& list, std::vector<Leaf>& leaves) {
  if (list.empty()) return;
  const ContainersByWay known = decode_containers(list);
  std::string last;  // the way to the leaf before
  std::shared_ptr<const Containers> shared;
  for (Leaf& leaf : leaves) {
    if (leaf.path.empty()) continue;
    const auto way = std::span<const PathPart>(leaf.path).first(leaf.path.size() - 1);
    std::string text = key_of(way, BadText::replace);
    if (text != last) {
      shared = containers_on(way, known);
      last = std::move(text);
    }
    leaf.containers = shared;
  }
}

// DCP says of plain tensors by itself that they need a gradient.
bool needs_gradient_entry(const Tensor& tensor, bool whole) {
  return tensor.requires_grad && (whole || tensor.parameter);
}

// Attributes that hold tensors have no place beside DCP.
bool needs_attributes_entry(const Tensor& tensor, bool whole) {
  return tensor.attributes && (whole || inner_tensors(Value(tensor)).empty());
}

// Members of an object: what a tensor is besides its elements. `whole`: also what DCP says by
// itself.
void append_tensor(JsonWriter& json, const Tensor& tensor, const TensorNames& names, bool whole) {
  if (tensor.parameter) append_true(json, "parameter");
  if (needs_gradient_entry(tensor, whole)) append_true(json, "requires_grad");
  if (needs_attributes_entry(tensor, whole))
    append_member(json, "attributes", *tensor.attributes, names);
  if (!tensor.bare_storage || !whole) return;
  json.key("storage");
  json.text(tensor.pieces.at(0).storage->torch_class);
}

// That the tensor is a bare storage of this class.
void decode_storage(const Json& torch_class, Tensor& tensor) {
  if (tensor.shape.size() != 1 || tensor.pieces.size() != 1)
    throw Error(ErrorCode::corrupt, "a storage of torch is one-dimensional and in one place");
  tensor.bare_storage = true;
  tensor.pieces[0].storage->torch_class = torch_class.get<std::string>();
}

void decode_tensor(const Json& item, const TensorsByName& tensors, Value& value) {
  Tensor& tensor = value.as_tensor();
  tensor.parameter = item.value("parameter", false);
  tensor.requires_grad = item.value("requires_grad", tensor.requires_grad);
  if (item.contains("attributes")) {
    tensor.attributes = std::make_shared<const Value>(decode_value(item.at("attributes"), tensors));
  }
  if (item.contains("storage")) decode_storage(item.at("storage"), tensor);
}

class TreeReader {
 public:
  TreeReader(const Json& tree, std::vector<Leaf>& tensors)
      : tree_(tree), tensors_(tensors), is_placed_(tensors.size()), is_inner_(tensors.size()) {
    at_.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) at_.emplace(tensors[i].name, i);
  }

  std::vector<Leaf> run() {
    if (tree_.contains("tensors")) decode_inner(tree_.at("tensors"));
    const Json& items = tree_.at("leaves");
    if (!items.is_array()) throw Error(ErrorCode::corrupt, "the tree's leaves are no list");
    std::vector<Leaf> ordered;
    ordered.reserve(items.size());
    for (const Json& item : items) add(item, ordered);
    add_others(ordered);
    return ordered;
  }

 private:
  void decode_inner(const Json& items) {
    for (const Json& item : items) {
      const auto found = at_.find(item.at("name").get_ref<const std::string&>());
      if (found == at_.end()) continue;
      is_inner_[found->second] = true;
      decode(item, tensors_[found->second].value);
    }
  }

  // Tensors that somebody added to the file keep their place after the tree's own.
  void add_others(std::vector<Leaf>& ordered) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (!is_placed_[i] && !is_inner_[i]) ordered.push_back(std::move(tensors_[i]));
    }
  }

  void add(const Json& item, std::vector<Leaf>& ordered) {
    Path path = decode_path(item.at("path"));
    std::string name = item.contains("name") ? item.at("name").get<std::string>() : dotted(path);
    if (item.contains("value")) {
      Value value = decode_value(item.at("value"), by_name());
      ordered.push_back({std::move(name), std::move(path), std::move(value)});
      return;
    }
    const auto found = at_.find(name);
    if (found == at_.end() || is_placed_[found->second]) return;  // in another file
    is_placed_[found->second] = true;
    Value& tensor = tensors_[found->second].value;
    decode(item, tensor);
    ordered.push_back({std::move(name), std::move(path), tensor});
  }

  void decode(const Json& item, Value& tensor) {
    if (is_missing_value(tensor)) return;  // nobody knows what it is
    decode_tensor(item, item.contains("attributes") ? by_name() : none_, tensor);
  }

  // Made for the first value or attribute, which few trees have.
  const TensorsByName& by_name() {
    if (by_name_.empty()) {
      for (const Leaf& leaf : tensors_) by_name_.emplace(leaf.name, leaf.value);
    }
    return by_name_;
  }

  const Json& tree_;
  std::vector<Leaf>& tensors_;
  std::unordered_map<std::string_view, std::size_t> at_;  // by name
  std::vector<bool> is_placed_;                           // in the tree
  std::vector<bool> is_inner_;                            // inside of a value
  TensorsByName by_name_;
  const TensorsByName none_;
};

Leaf decode_empty_dict(const Json& item) {
  return {item.at("name").get<std::string>(), decode_path(item.at("path")),
          decode_value(item.at("value"))};
}

// Those of the side file, each at its index among all leaves.
void insert_empty_dicts(const Json& items, std::vector<Leaf>& leaves) {
  std::vector<Leaf> all;
  auto next = leaves.begin();
  for (const Json& item : items) {
    if (!item.contains("value")) continue;
    const auto at = item.at("at").get<std::size_t>();
    for (; all.size() < at && next != leaves.end(); ++next) all.push_back(std::move(*next));
    all.push_back(decode_empty_dict(item));
  }
  if (all.empty()) return;
  std::move(next, leaves.end(), std::back_inserter(all));
  leaves = std::move(all);
}

// Steps of two types are two, though they look alike: the key 1 and the key "1".
std::string way_of(std::span<const PathPart> path) {
  std::string way;
  for (const PathPart& part : path) way += std::to_string(part.index()) + step_text(part) + '\0';
  return way;
}

void require_known_version(const Json& json, const std::string& what) {
  const int version = json.at("version").get<int>();
  if (version < kVersion || version > kNewestVersion)
    throw Error(ErrorCode::unsupported, what + " has version " + std::to_string(version));
}

// The depth of brackets in JSON; in another text some number.
int deepest(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_string = !in_string;
    if (!in_string) {
      depth += static_cast<int>(c == '[' || c == '{') - static_cast<int>(c == ']' || c == '}');
      deepest = std::max(deepest, depth);
    } else if (c == '\\') {
      ++i;
    }
  }
  return deepest;
}

Json parsed(const std::string& text, const std::string& what) {
  // Counted first: with a callback the parser looks through all leaves at the end of each.
  if (deepest(text) > kMaxDepth) throw Error(ErrorCode::limit, what + " is nested too deep");
  Json json = Json::parse(text);
  require_known_version(json, what);
  return json;
}

// Calls `use` with the tree in `text`, which messages call `what`.
template <typename Use>
void with_tree(const std::string& text, const std::string& what, Use use) {
  try {
    use(parsed(text, what));
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt, what + " is malformed: " + json_fault(error));
  }
}

// Calls `use` with our entry, when there is one.
template <typename Use>
void with_entry(const std::map<std::string, std::string>& metadata, Use use) {
  const auto entry = metadata.find(kTreeKey);
  if (entry == metadata.end()) return;
  with_tree(entry->second, std::string("the metadata entry '") + kTreeKey + "'", use);
}

TensorNames names_of_tensors(const std::vector<Leaf>& leaves) {
  TensorNames names;
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) names.emplace(leaf.value.identity(), leaf.name);
  }
  return names;
}

bool is_named_by_path(const Leaf& leaf) {
  return is_in_tree(leaf) && dotted(leaf.path) == leaf.name;
}

void append_leaf(JsonWriter& json, const Leaf& leaf, const TensorNames& names) {
  json.begin('{');
  if (is_in_tree(leaf)) append_path_member(json, leaf.path);
  if (!is_named_by_path(leaf)) append_name(json, leaf.name);
  if (leaf.value.is(Value::Kind::tensor)) {
    append_tensor(json, leaf.value.as_tensor(), names, true);
  } else {
    append_member(json, "value", leaf.value, names);
  }
  json.end('}');
}

int version_of(const std::vector<Leaf>& leaves) {
  const bool newest = std::ranges::any_of(
      leaves, [](const Leaf& leaf) { return !is_in_tree(leaf) || has_odd_key(leaf.path); });
  return newest ? kNewestVersion : kVersion;
}

// What the side file says of the leaf at `index`, if it is anything.
void append_type(JsonWriter& json, const Leaf& leaf, std::size_t index) {
  JsonWriter members;
  const bool empty = is_empty_dict(leaf);
  if (has_odd_key(leaf.path) || empty) append_path_member(members, leaf.path);
  if (empty) {
    append_member(members, "value", leaf.value);
    members.key("at");
    members.integer(static_cast<std::int64_t>(index));
  }
  if (leaf.value.is(Value::Kind::tensor)) append_tensor(members, leaf.value.as_tensor(), {}, false);
  if (members.json().empty()) return;
  append_name(members, leaf.name);
  json.begin('{');
  json.raw(members.json());
  json.end('}');
}

// Up to the list of leaves.
JsonWriter begun_tree(int version) {
  JsonWriter json;
  json.begin('{');
  json.key("version");
  json.integer(version);
  json.key("leaves");
  json.begin('[');
  return json;
}

// Before and while it is made: few or many small items may stand for values that fill the memory as
// text.
void require_fits_header(std::uint64_t bytes) {
  if (bytes <= safetensors::kHeaderLimit) return;
  throw Error(ErrorCode::limit, "the values that are no tensors have more than " +
                                    std::to_string(safetensors::kHeaderLimit) +
                                    " bytes in a safetensors header, which readers refuse");
}

void require_fits_header(const std::vector<Leaf>& leaves) {
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : leaves) bytes += fewest_bytes(leaf.value);
  require_fits_header(bytes);
}

void decode_type(const Json& item, Leaf& leaf) {
  if (item.contains("path")) leaf.path = decode_path(item.at("path"));
  if (leaf.value.is(Value::Kind::tensor)) decode_tensor(item, {}, leaf.value);
}

void decode_types(const Json& items, std::vector<Leaf>& leaves) {
  std::unordered_map<std::string_view, Leaf*> by_name;
  for (Leaf& leaf : leaves) by_name.emplace(leaf.name, &leaf);
  for (const Json& item : items) {
    const auto found = by_name.find(item.at("name").get_ref<const std::string&>());
    if (found != by_name.end()) decode_type(item, *found->second);
  }
}

}  // namespace

std::string encode_tree(const std::vector<Leaf>& leaves, std::uint64_t& values) {
  require_fits_header(leaves);
  const TensorNames names = names_of_tensors(leaves);
  JsonWriter tree = begun_tree(version_of(leaves));
  JsonWriter inner;
  for (const Leaf& leaf : leaves) {
    append_leaf(is_in_tree(leaf) ? tree : inner, leaf, names);
    require_fits_header(tree.json().size() + inner.json().size());
  }
  tree.end(']');
  if (!inner.json().empty()) {
    tree.key("tensors");
    tree.begin('[');
    tree.raw(inner.json());
    tree.end(']');
  }
  values += static_cast<std::uint64_t>(std::ranges::count_if(
      leaves, [](const Leaf& leaf) { return !leaf.value.is(Value::Kind::tensor); }));
  append_containers(tree, leaves);
  tree.end('}');
  return tree.take();
}

bool add_from_metadata(const std::map<std::string, std::string>& metadata,
                       std::vector<Leaf>& leaves) {
  bool has_types = false;
  with_entry(metadata, [&](const Json& tree) {
    leaves = TreeReader(tree, leaves).run();
    has_types = tree.contains("containers");
    if (has_types) add_containers(tree.at("containers"), leaves);
  });
  return has_types;
}

void for_each_archive(const std::map<std::string, std::string>& metadata,
                      const std::function<void(std::vector<std::byte> bytes)>& take) {
  with_entry(metadata, [&take](const Json& tree) { for_each_archive(tree, take); });
}

bool is_empty_dict(const Leaf& leaf) {
  return leaf.value.is(Value::Kind::dict) && leaf.value.size() == 0;
}

void drop_filled_dicts(std::vector<Leaf>& leaves) {
  if (std::ranges::none_of(leaves, is_empty_dict)) return;
  std::unordered_set<std::string> ways;  // to whatever has leaves below it
  for (const Leaf& leaf : leaves) {
    for (std::size_t depth = 1; depth < leaf.path.size(); ++depth)
      ways.insert(way_of(std::span(leaf.path).first(depth)));
  }
  std::erase_if(leaves, [&](const Leaf& leaf) {
    return is_empty_dict(leaf) && ways.contains(way_of(leaf.path));
  });
}

std::string encode_types(const std::vector<Leaf>& leaves) {
  JsonWriter tree = begun_tree(kVersion);
  for (std::size_t i = 0; i < leaves.size(); ++i) append_type(tree, leaves[i], i);
  tree.end(']');
  append_containers(tree, leaves);
  tree.end('}');
  return tree.take();
}

void add_types(const std::string& text, std::vector<Leaf>& leaves) {
  with_tree(text, "the side file's tree", [&leaves](const Json& tree) {
    insert_empty_dicts(tree.at("leaves"), leaves);
    decode_types(tree.at("leaves"), leaves);
    drop_filled_dicts(leaves);
    add_containers(tree.at("containers"), leaves);
  });
}

}  // namespace tessera
