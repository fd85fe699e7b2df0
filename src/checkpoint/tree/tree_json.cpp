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

std::shared_ptr<const Container> decode_container(const Json& item) {
  Container container;
  const std::string kind = item.at("kind").get<std::string>();
  const auto* found = std::find_if(std::begin(kKinds), std::end(kKinds),
                                   [&kind](DictKind known) { return kind == type_name(known); });
  if (found == std::end(kKinds))
    throw Error(ErrorCode::corrupt, "unknown kind of a container: '" + kind + "'");
  container.kind = *found;
  if (item.contains("state")) container.state = decode_value(item.at("state"));
  if (item.contains("factory")) container.default_factory = decode_value(item.at("factory"));
  return std::make_shared<const Container>(std::move(container));
}

// Paths are compared by their JSON.
std::string key_of(const Json& path) {
  return path.dump(-1, ' ', true, Json::error_handler_t::replace);
}

// The dicts that are more than plain ones, each by its path.
Json encode_containers(const std::vector<Leaf>& leaves) {
  Json list = Json::array();
  std::unordered_set<const Containers*> met;
  std::unordered_set<std::string> known;
  for (const Leaf& leaf : leaves) {
    if (!leaf.containers || !met.insert(leaf.containers.get()).second) continue;
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

void add_containers(const Json& list, std::vector<Leaf>& leaves) {
  if (list.empty()) return;
  ContainersByWay known;
  for (const Json& item : list) known[key_of(item.at("path"))] = decode_container(item);
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

// What a tensor is besides its elements. `whole`: also what DCP says by itself; attributes that
// hold tensors have no place there.
void encode_tensor(const Tensor& tensor, const TensorNames& names, Json& item, bool whole) {
  if (tensor.parameter) item["parameter"] = true;
  if (tensor.requires_grad && (whole || tensor.parameter)) item["requires_grad"] = true;
  const bool kept = tensor.attributes && (whole || inner_tensors(Value(tensor)).empty());
  if (kept) item["attributes"] = encode_value(*tensor.attributes, names);
  if (tensor.bare_storage && whole) item["storage"] = tensor.pieces.at(0).storage->torch_class;
}

void decode_tensor(const Json& item, const TensorsByName& tensors, Value& value) {
  Tensor& tensor = value.as_tensor();
  tensor.parameter = item.value("parameter", false);
  tensor.requires_grad = item.value("requires_grad", tensor.requires_grad);
  if (item.contains("attributes")) {
    tensor.attributes = std::make_shared<const Value>(decode_value(item.at("attributes"), tensors));
  }
  if (!item.contains("storage")) return;
  if (tensor.shape.size() != 1 || tensor.pieces.size() != 1)
    throw Error(ErrorCode::corrupt, "a storage of torch is one-dimensional and in one place");
  tensor.bare_storage = true;
  tensor.pieces[0].storage->torch_class = item.at("storage").get<std::string>();
}

class TreeReader {
 public:
  TreeReader(const Json& tree, std::vector<Leaf>& tensors) : tree_(tree), tensors_(tensors) {
    for (const Leaf& leaf : tensors) by_name_.emplace(leaf.name, leaf.value);
  }

  std::vector<Leaf> run() {
    if (tree_.contains("tensors")) {
      for (const Json& item : tree_.at("tensors")) {
        const auto name = item.at("name").get<std::string>();
        inner_.insert(name);
        if (const auto found = by_name_.find(name); found != by_name_.end())
          decode_tensor(item, by_name_, found->second);
      }
    }
    if (!tree_.at("leaves").is_array())
      throw Error(ErrorCode::corrupt, "the tree's leaves are no list");
    std::vector<Leaf> ordered;
    for (const Json& item : tree_.at("leaves")) add(item, ordered);
    // Tensors that somebody added to the file keep their place after the tree's own.
    for (Leaf& leaf : tensors_) {
      if (!placed_.contains(leaf.name) && !inner_.contains(leaf.name))
        ordered.push_back(std::move(leaf));
    }
    return ordered;
  }

 private:
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

// Those of the side file, each at its index among all leaves.
void insert_empty_dicts(const Json& items, std::vector<Leaf>& leaves) {
  std::vector<Leaf> all;
  auto next = leaves.begin();
  for (const Json& item : items) {
    if (!item.contains("value")) continue;
    const auto at = item.at("at").get<std::size_t>();
    for (; all.size() < at && next != leaves.end(); ++next) all.push_back(std::move(*next));
    all.push_back({item.at("name").get<std::string>(), decode_path(item.at("path")),
                   decode_value(item.at("value"))});
  }
  if (all.empty()) return;
  std::move(next, leaves.end(), std::back_inserter(all));
  leaves = std::move(all);
}

Json parsed(const std::string& text, const std::string& what) {
  const auto shallow = [&what](int depth, Json::parse_event_t, Json&) {
    if (depth <= kMaxDepth) return true;
    throw Error(ErrorCode::limit, what + " is nested too deep");
  };
  Json json = Json::parse(text, shallow);
  const int version = json.at("version").get<int>();
  if (version < kVersion || version > kNewestVersion)
    throw Error(ErrorCode::unsupported, what + " has version " + std::to_string(version));
  return json;
}

// Calls `use` with our entry, when there is one.
template <typename Use>
void with_entry(const std::map<std::string, std::string>& metadata, Use use) {
  const auto entry = metadata.find(kTreeKey);
  if (entry == metadata.end()) return;
  const std::string what = std::string("the metadata entry '") + kTreeKey + "'";
  try {
    use(parsed(entry->second, what));
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt, what + " is malformed: " + error.what());
  }
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

Json encode_leaf(const Leaf& leaf, const TensorNames& names) {
  Json item = Json::object();
  const bool in_tree = is_in_tree(leaf);
  if (in_tree) item["path"] = encode_path(leaf.path);
  if (!in_tree || dotted(leaf.path) != leaf.name) item["name"] = leaf.name;
  if (leaf.value.is(Value::Kind::tensor)) {
    encode_tensor(leaf.value.as_tensor(), names, item, true);
  } else {
    item["value"] = encode_value(leaf.value, names);
  }
  return item;
}

}  // namespace

std::string encode_tree(const std::vector<Leaf>& leaves, std::uint64_t& values) {
  const TensorNames names = names_of_tensors(leaves);
  Json list = Json::array();
  Json inner = Json::array();
  for (const Leaf& leaf : leaves) {
    (is_in_tree(leaf) ? list : inner).push_back(encode_leaf(leaf, names));
    if (!leaf.value.is(Value::Kind::tensor)) ++values;
  }
  const bool odd_keys =
      std::ranges::any_of(leaves, [](const Leaf& leaf) { return has_odd_key(leaf.path); });
  Json tree = Json::object();
  tree["version"] = odd_keys || !inner.empty() ? kNewestVersion : kVersion;
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
    const Leaf& leaf = leaves[i];
    Json item = Json::object();
    const bool empty = is_empty_dict(leaf);
    if (has_odd_key(leaf.path) || empty) item["path"] = encode_path(leaf.path);
    if (empty) {
      item["value"] = encode_value(leaf.value);
      item["at"] = i;
    }
    if (leaf.value.is(Value::Kind::tensor)) encode_tensor(leaf.value.as_tensor(), {}, item, false);
    if (item.empty()) continue;
    item["name"] = leaf.name;
    list.push_back(std::move(item));
  }
  Json tree = Json::object();
  tree["version"] = kVersion;
  tree["leaves"] = std::move(list);
  tree["containers"] = encode_containers(leaves);
  return text_of_json(tree);
}

void add_types(const std::string& text, std::vector<Leaf>& leaves) {
  try {
    const Json tree = parsed(text, "the side file's tree");
    insert_empty_dicts(tree.at("leaves"), leaves);
    std::unordered_map<std::string_view, Leaf*> by_name;
    for (Leaf& leaf : leaves) by_name.emplace(leaf.name, &leaf);
    for (const Json& item : tree.at("leaves")) {
      const auto found = by_name.find(item.at("name").get_ref<const std::string&>());
      if (found == by_name.end()) continue;
      Leaf& leaf = *found->second;
      if (item.contains("path")) leaf.path = decode_path(item.at("path"));
      if (leaf.value.is(Value::Kind::tensor)) decode_tensor(item, {}, leaf.value);
    }
    add_containers(tree.at("containers"), leaves);
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt,
                std::string("the side file's tree is malformed: ") + error.what());
  }
}

}  // namespace tessera
