#include "checkpoint/tree/tree_json.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/tree/value_json.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

// Of the entry's schema. Readers of version 1 ignore members that they do not know; an entry with
// something that they would misread has version 2.
constexpr int kVersion = 1;
constexpr int kNewestVersion = 2;
constexpr int kMaxDepth =
    4096;  // of the JSON: containers are at most 1000 deep, each two of its own

constexpr DictKind kKinds[] = {DictKind::dict, DictKind::ordered_dict, DictKind::default_dict};

// Leaves of a tree; the others are tensors inside of them.
bool is_in_tree(const Leaf& leaf) {
  return !leaf.path.empty() || leaf.name.empty();
}

bool has_odd_key(const Path& path) {
  return std::any_of(path.begin(), path.end(),
                     [](const PathPart& part) { return std::holds_alternative<DictKey>(part); });
}

Json encode_container(const Container& container) {
  Json item = Json::object();
  item["kind"] = type_name(container.kind);
  if (container.state) item["state"] = encode_value(*container.state);
  if (container.default_factory) item["factory"] = encode_value(*container.default_factory);
  return item;
}

DictKind kind_named(const std::string& name) {
  const auto* found = std::ranges::find(kKinds, name, type_name);
  if (found == std::end(kKinds))
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

// Those around a leaf whose paths are not `known` yet.
void encode_around(const Leaf& leaf, std::unordered_set<std::string>& known, Json& list) {
  const std::size_t depth = std::min(leaf.containers->size(), leaf.path.size());
  for (std::size_t step = 0; step < depth; ++step) {
    const Container* container = (*leaf.containers)[step].get();
    if (container == nullptr) continue;
    const auto end = leaf.path.begin() + static_cast<std::ptrdiff_t>(step);
    Json path = encode_path(Path(leaf.path.begin(), end));
    if (!known.insert(key_of(path)).second) continue;
    Json item = Json::object();
    item["path"] = std::move(path);
    item.update(encode_container(*container));
    list.push_back(std::move(item));
  }
}

// The dicts that are more than plain ones, each by its path.
Json encode_containers(const std::vector<Leaf>& leaves) {
  Json list = Json::array();
  std::unordered_set<const Containers*> met;
  std::unordered_set<std::string> known;
  for (const Leaf& leaf : leaves) {
    if (leaf.containers && met.insert(leaf.containers.get()).second)
      encode_around(leaf, known, list);
  }
  return list;
}

using ContainersByWay = std::unordered_map<std::string, std::shared_ptr<const Container>>;

// The containers on the way to a leaf, the outermost first; null when none of them is known.
std::shared_ptr<const Containers> containers_on(Json way, const ContainersByWay& known) {
  Containers containers(way.size() + 1);
  bool plain = true;
  for (std::size_t step = containers.size(); step-- > 0;) {
    const auto found = known.find(key_of(way));
    if (found != known.end()) {
      containers[step] = found->second;
      plain = false;
    }
    if (step > 0) way.erase(step - 1);
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
    Json way = encode_path(Path(leaf.path.begin(), leaf.path.end() - 1));
    std::string text = key_of(way);
    if (text != last) {
      shared = containers_on(std::move(way), known);
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

// What a tensor is besides its elements. `whole`: also what DCP says by itself.
void encode_tensor(const Tensor& tensor, const TensorNames& names, Json& item, bool whole) {
  if (tensor.parameter) item["parameter"] = true;
  if (needs_gradient_entry(tensor, whole)) item["requires_grad"] = true;
  if (needs_attributes_entry(tensor, whole))
    item["attributes"] = encode_value(*tensor.attributes, names);
  if (tensor.bare_storage && whole) item["storage"] = tensor.pieces.at(0).storage->torch_class;
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
  TreeReader(const Json& tree, std::vector<Leaf>& tensors) : tree_(tree), tensors_(tensors) {
    for (const Leaf& leaf : tensors) by_name_.emplace(leaf.name, leaf.value);
  }

  std::vector<Leaf> run() {
    if (tree_.contains("tensors")) decode_inner(tree_.at("tensors"));
    if (!tree_.at("leaves").is_array())
      throw Error(ErrorCode::corrupt, "the tree's leaves are no list");
    std::vector<Leaf> ordered;
    for (const Json& item : tree_.at("leaves")) add(item, ordered);
    add_others(ordered);
    return ordered;
  }

 private:
  void decode_inner(const Json& items) {
    for (const Json& item : items) {
      const auto name = item.at("name").get<std::string>();
      inner_.insert(name);
      if (const auto found = by_name_.find(name); found != by_name_.end())
        decode_tensor(item, by_name_, found->second);
    }
  }

  // Tensors that somebody added to the file keep their place after the tree's own.
  void add_others(std::vector<Leaf>& ordered) {
    for (Leaf& leaf : tensors_) {
      if (!placed_.contains(leaf.name) && !inner_.contains(leaf.name))
        ordered.push_back(std::move(leaf));
    }
  }

  void add(const Json& item, std::vector<Leaf>& ordered) {
    Path path = decode_path(item.at("path"));
    std::string name = item.value("name", dotted(path));
    if (item.contains("value")) {
      Value value = decode_value(item.at("value"), by_name_);
      ordered.push_back({std::move(name), std::move(path), std::move(value)});
      return;
    }
    const auto tensor = by_name_.find(name);
    if (tensor == by_name_.end() || !placed_.insert(name).second) return;  // in another file
    decode_tensor(item, by_name_, tensor->second);
    ordered.push_back({std::move(name), std::move(path), tensor->second});
  }

  const Json& tree_;
  std::vector<Leaf>& tensors_;
  TensorsByName by_name_;
  std::unordered_set<std::string> placed_;  // tensors with a place in the tree
  std::unordered_set<std::string> inner_;   // and those inside of values
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

void require_known_version(const Json& json, const std::string& what) {
  const int version = json.at("version").get<int>();
  if (version < kVersion || version > kNewestVersion)
    throw Error(ErrorCode::unsupported, what + " has version " + std::to_string(version));
}

Json parsed(const std::string& text, const std::string& what) {
  const auto shallow = [&what](int depth, Json::parse_event_t, Json&) {
    if (depth <= kMaxDepth) return true;
    throw Error(ErrorCode::limit, what + " is nested too deep");
  };
  Json json = Json::parse(text, shallow);
  require_known_version(json, what);
  return json;
}

// Calls `use` with the tree in `text`, which messages call `what`.
template <typename Use>
void with_tree(const std::string& text, const std::string& what, Use use) {
  try {
    use(parsed(text, what));
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt, what + " is malformed: " + error.what());
  }
}

// Calls `use` with our entry, when there is one.
template <typename Use>
void with_entry(const std::map<std::string, std::string>& metadata, Use use) {
  const auto entry = metadata.find(kTreeKey);
  if (entry == metadata.end()) return;
  with_tree(entry->second, std::string("the metadata entry '") + kTreeKey + "'", use);
}

std::string text_of_json(const Json& json) {
  try {
    return json.dump(-1, ' ', true);
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::unsupported,
                std::string("a name or text is not UTF-8: ") + error.what());
  }
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

Json encode_leaf(const Leaf& leaf, const TensorNames& names) {
  Json item = Json::object();
  if (is_in_tree(leaf)) item["path"] = encode_path(leaf.path);
  if (!is_named_by_path(leaf)) item["name"] = leaf.name;
  if (leaf.value.is(Value::Kind::tensor)) {
    encode_tensor(leaf.value.as_tensor(), names, item, true);
  } else {
    item["value"] = encode_value(leaf.value, names);
  }
  return item;
}

int version_of(const std::vector<Leaf>& leaves) {
  const bool newest = std::ranges::any_of(
      leaves, [](const Leaf& leaf) { return !is_in_tree(leaf) || has_odd_key(leaf.path); });
  return newest ? kNewestVersion : kVersion;
}

// What the side file says of the leaf at `index`; empty: nothing.
Json encode_type(const Leaf& leaf, std::size_t index) {
  Json item = Json::object();
  const bool empty = is_empty_dict(leaf);
  if (has_odd_key(leaf.path) || empty) item["path"] = encode_path(leaf.path);
  if (empty) {
    item["value"] = encode_value(leaf.value);
    item["at"] = index;
  }
  if (leaf.value.is(Value::Kind::tensor)) encode_tensor(leaf.value.as_tensor(), {}, item, false);
  return item;
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
  const TensorNames names = names_of_tensors(leaves);
  Json list = Json::array();
  Json inner = Json::array();
  for (const Leaf& leaf : leaves) {
    (is_in_tree(leaf) ? list : inner).push_back(encode_leaf(leaf, names));
  }
  values += static_cast<std::uint64_t>(std::ranges::count_if(
      leaves, [](const Leaf& leaf) { return !leaf.value.is(Value::Kind::tensor); }));
  Json tree = Json::object();
  tree["version"] = version_of(leaves);
  tree["leaves"] = std::move(list);
  if (!inner.empty()) tree["tensors"] = std::move(inner);
  tree["containers"] = encode_containers(leaves);
  return text_of_json(tree);
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

std::string encode_types(const std::vector<Leaf>& leaves) {
  Json list = Json::array();
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    Json item = encode_type(leaves[i], i);
    if (item.empty()) continue;
    item["name"] = leaves[i].name;
    list.push_back(std::move(item));
  }
  Json tree = Json::object();
  tree["version"] = kVersion;
  tree["leaves"] = std::move(list);
  tree["containers"] = encode_containers(leaves);
  return text_of_json(tree);
}

void add_types(const std::string& text, std::vector<Leaf>& leaves) {
  with_tree(text, "the side file's tree", [&leaves](const Json& tree) {
    insert_empty_dicts(tree.at("leaves"), leaves);
    decode_types(tree.at("leaves"), leaves);
    add_containers(tree.at("containers"), leaves);
  });
}

}  // namespace tessera
