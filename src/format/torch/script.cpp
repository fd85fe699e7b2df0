#include "format/torch/script.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/text.h"
#include "format/torch/modules.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/equality.h"
#include "value/render.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

// Bytes of names, and for each about what it takes: a module may be in several places.
constexpr std::uint64_t kMostNames = 128 << 20;
constexpr std::uint64_t kOfName = 128;
constexpr std::size_t kMostNested = 1000;      // modules inside one another
constexpr std::uint64_t kMostCode = 64 << 20;  // bytes of all files that are read
constexpr std::size_t kNamesOfNote = 5;

// What every module that TorchScript compiled has besides, and no state dict; nor has one None.
constexpr std::array<std::string_view, 2> kOfEveryModule{"training", "_is_full_backward_hook"};

bool is_script_class(const Value& callable) {
  if (!callable.is(Kind::global)) return false;
  const std::string& module = callable.global_module();
  return module == "__torch__" || module.starts_with("__torch__.");
}

// The attributes of a module, or of an object of a class of the archive's own; null: it is neither,
// or its state is what only its code can take.
const Value* attributes_in(const Value& value) {
  if (!value.is(Kind::object)) return nullptr;
  const Object& object = value.as_object();
  const bool is_plain = object.by_new && is_script_class(object.callable) && object.state &&
                        object.state->is(Kind::dict) && object.list_items.empty() &&
                        object.dict_items.empty();
  if (!is_plain) return nullptr;
  const auto has_name = [](const Value::Pair& pair) { return pair.first.is(Kind::string); };
  return std::ranges::all_of(object.state->pairs(), has_name) ? &*object.state : nullptr;
}

// The parameters and buffers of the classes of an archive, from the lists that each begins with.
class Classes {
 public:
  explicit Classes(const CodeOf& code_of) : code_of_(code_of) {}

  // Whether the class lists this attribute as a parameter or buffer; one without lists lists all.
  bool lists(const Value& global, const std::string& attribute) {
    std::string file = global.global_module();
    std::ranges::replace(file, '.', '/');
    const auto [known, fresh] = files_.try_emplace(file);
    if (fresh) known->second = classes_in(code_of_(file));
    const auto found = known->second.find(global.global_name());
    return found == known->second.end() || found->second.lists < 2 ||
           found->second.names.contains(attribute);
  }

 private:
  struct Listed {
    std::set<std::string, std::less<>> names;
    int lists = 0;  // of parameters, and of buffers
  };
  using ByName = std::map<std::string, Listed, std::less<>>;

  // One pass over the lines, which is all that is kept of them.
  ByName classes_in(const std::string& text) {
    text_ += text.size();
    if (text_ > kMostCode) {
      throw Error(ErrorCode::limit,
                  "the archive has more than " + std::to_string(kMostCode >> 20U) + " MiB of code");
    }
    constexpr std::string_view kClass = "class ";
    constexpr std::array<std::string_view, 2> kLists{"  __parameters__ = [", "  __buffers__ = ["};
    ByName classes;
    Listed* at = nullptr;
    std::string_view rest = text;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find('\n'), rest.size() - 1) + 1;
      const std::string_view line = rest.substr(0, end);
      rest.remove_prefix(end);
      if (line.starts_with(kClass)) {
        const std::string_view name = line.substr(kClass.size());
        at = &classes[std::string(name.substr(0, name.find('(')))];
      }
      for (const std::string_view head : kLists) {
        if (at != nullptr && line.starts_with(head) &&
            add_list(line.substr(head.size()), at->names))
          ++at->lists;
      }
    }
    return classes;
  }

  // "weight", "bias", ]
  static bool add_list(std::string_view line, std::set<std::string, std::less<>>& names) {
    const std::size_t end = line.find(']');
    if (end == std::string_view::npos) return false;
    line = line.substr(0, end);
    for (std::size_t open = line.find('"'); open != std::string_view::npos; open = line.find('"')) {
      line.remove_prefix(open + 1);
      const std::size_t close = line.find('"');
      if (close == std::string_view::npos) return false;
      names.emplace(line.substr(0, close));
      line.remove_prefix(close + 1);
    }
    return true;
  }

  const CodeOf& code_of_;
  std::unordered_map<std::string, ByName> files_;
  std::uint64_t text_ = 0;  // bytes that were read
};

// C++'s optimizers, torch/optim/serialize.h: what they write as modules and numbered attributes.

constexpr std::string_view kGroup = "param_groups/", kParameter = "params/", kSize = "size";

// The attributes "PREFIX0", "PREFIX1", ... as far as they go; none: there are others that begin so,
// but for PREFIXsize.
std::optional<std::vector<Value>> numbered(const Value& attributes, std::string_view prefix) {
  std::vector<Value> items;
  for (;;) {
    const Value* item = attributes.find(std::string(prefix) + std::to_string(items.size()));
    if (item == nullptr) break;
    items.push_back(*item);
  }
  const auto all = std::ranges::count_if(attributes.pairs(), [&](const Value::Pair& pair) {
    return pair.first.as_string().starts_with(prefix) &&
           pair.first.as_string() != std::string(prefix) + std::string(kSize);
  });
  if (all != std::ssize(items)) return std::nullopt;
  return items;
}

// The numbers of an optimizer's parameters, by their ids. Each place in a group counts; one that
// comes again, as a tied one does in what C++'s `parameters()` gives, has in all of them the last
// number of the first group that has it: so Optimizer.state_dict() of Python counts.
class Numbers {
 public:
  [[nodiscard]] Value of_group(const std::vector<std::string>& ids) {
    std::unordered_map<std::string, std::int64_t> in_group;
    for (const std::string& id : ids) in_group[id] = next_++;
    numbers_.merge(in_group);
    Value numbers = Value::list();
    for (const std::string& id : ids) numbers.items().emplace_back(numbers_.at(id));
    return numbers;
  }

  // By number.
  [[nodiscard]] std::map<std::int64_t, std::string> ids() const {
    std::map<std::int64_t, std::string> ids;
    for (const auto& [id, number] : numbers_) ids.emplace(number, id);
    return ids;
  }

 private:
  std::unordered_map<std::string, std::int64_t> numbers_;
  std::int64_t next_ = 0;
};

// {"params": numbers, **options} of a group; none: it is made otherwise.
std::optional<Value> group_of(const Value& group, Numbers& all) {
  const Value* attributes = attributes_in(group);
  if (attributes == nullptr) return std::nullopt;
  const auto ids = numbered(*attributes, kParameter);
  const Value* options = attributes->find("options");
  const Value* named = options != nullptr ? attributes_in(*options) : nullptr;
  if (!ids || (options != nullptr && named == nullptr)) return std::nullopt;
  std::vector<std::string> parameters;
  for (const Value& id : *ids) {
    if (!id.is(Kind::string)) return std::nullopt;
    parameters.push_back(id.as_string());
  }
  Value made = Value::dict({{"params", all.of_group(parameters)}});
  if (named != nullptr)
    for (const auto& [name, value] : named->pairs()) made.set_item(name, value);
  return made;
}

// What a parameter's state has, by name; none: something that is not of an optimizer's.
std::optional<Value> state_of(const Value& state) {
  const Value* attributes = attributes_in(state);
  if (attributes == nullptr) return std::nullopt;
  Value made = Value::dict();
  for (const auto& [name, value] : attributes->pairs()) made.set_item(name, detached(value));
  return made;
}

// Optimizer.state_dict() of what torch::save wrote of an optimizer; none: it is none, or one whose
// parameters have no order.
std::optional<Value> optimizer_of(const Value& attributes) {
  const Value* const states = attributes.find("state");
  const Value* const groups = attributes.find("param_groups");
  if (attributes.find("pytorch_version") == nullptr || states == nullptr || groups == nullptr ||
      attributes.size() != 3)
    return std::nullopt;
  const Value* const by_id = attributes_in(*states);
  const Value* const in_groups = attributes_in(*groups);
  if (by_id == nullptr || in_groups == nullptr) return std::nullopt;
  const auto listed = numbered(*in_groups, kGroup);
  if (!listed) return std::nullopt;
  Numbers numbers;
  Value made_groups = Value::list();
  for (const Value& group : *listed) {
    auto made = group_of(group, numbers);
    if (!made) return std::nullopt;
    made_groups.items().push_back(std::move(*made));
  }
  Value made_states = Value::dict();
  for (const auto& [number, id] : numbers.ids()) {
    const Value* const state = by_id->find(id);
    if (state == nullptr) continue;
    auto made = state_of(*state);
    if (!made) return std::nullopt;
    made_states.set_item(number, std::move(*made));
  }
  if (made_states.size() != by_id->size()) return std::nullopt;  // of a parameter in no group
  return Value::dict({{"state", std::move(made_states)}, {"param_groups", std::move(made_groups)}});
}

// Walks the modules.
class Names {
 public:
  explicit Names(Classes classes) : classes_(std::move(classes)) {}

  void add(const Value& module, const Value& attributes, const std::string& prefix) {
    if (!inside_.insert(module.identity()).second)
      throw Error(ErrorCode::corrupt, "a module that holds itself").at_key(prefix);
    if (inside_.size() > kMostNested)
      throw Error(ErrorCode::limit, "modules nested too deep").at_key(prefix);
    for (const auto& [key, value] : attributes.pairs()) {
      const std::string& attribute = key.as_string();
      count(prefix.size() + attribute.size());
      add_one(module.as_object().callable, attribute, value, prefix + attribute);
    }
    inside_.erase(module.identity());
  }

  void add_constants(const Value& constants) {
    if (!is_sequence(constants.kind())) return;
    for (std::size_t i = 0; i < constants.size(); ++i)
      add_other("CONSTANTS.c" + std::to_string(i), detached(constants.items()[i]));
  }

  [[nodiscard]] Script take() {
    // No OrderedDict: torch::pickle_load would read None where one is written.
    Script made{Value::dict(std::move(pairs_)), {}};
    if (!others_.empty()) made.notes.push_back(note_of_others());
    return made;
  }

 private:
  void add_one(const Value& owner, const std::string& attribute, const Value& value,
               const std::string& name) {
    const bool is_of_every = std::ranges::find(kOfEveryModule, attribute) != kOfEveryModule.end();
    if (value.is(Kind::none) || (is_of_every && value.is(Kind::boolean))) return;
    if (const Value* below = attributes_in(value)) {
      if (auto optimizer = optimizer_of(*below)) return add_pair(name, std::move(*optimizer));
      return add(value, *below, name + ".");
    }
    if (value.is(Kind::tensor) && classes_.lists(owner, attribute))
      return add_pair(name, detached(value));
    add_other(name, detached(value));
  }

  void add_other(const std::string& name, Value value) {
    others_.push_back(name);
    add_pair(name, std::move(value));
  }

  void add_pair(const std::string& name, Value value) {
    if (!taken_.insert(name).second)
      throw Error(ErrorCode::conflict, "two attributes of modules get one name").at_key(name);
    pairs_.emplace_back(name, std::move(value));
  }

  void count(std::size_t name) {
    text_ += name + kOfName;
    if (text_ > kMostNames) {
      throw Error(ErrorCode::limit, "the names of a module are more than " +
                                        std::to_string(kMostNames >> 20U) + " MiB of text");
    }
  }

  [[nodiscard]] std::string note_of_others() const {
    std::string text;
    for (std::size_t i = 0; i < std::min(others_.size(), kNamesOfNote); ++i)
      text += (i == 0 ? "" : ", ") + printable(others_[i], 200);
    if (others_.size() > kNamesOfNote)
      text += " and " + std::to_string(others_.size() - kNamesOfNote) + " more";
    return "the archive's modules have besides parameters and buffers " + text;
  }

  Classes classes_;
  std::vector<Value::Pair> pairs_;
  std::unordered_set<std::string> taken_;  // their names
  std::vector<std::string> others_;
  std::unordered_set<const void*> inside_;
  std::uint64_t text_ = 0;
};

// torch::save of a tensor, or of a vector of them, gives them numbers in a module without a name.
std::optional<Value> numbered_tensors(const Value& data, const Value& attributes) {
  const Value& callable = data.as_object().callable;
  if (callable.global_module() != "__torch__" || callable.global_name() != "Module")
    return std::nullopt;
  const auto items = numbered(attributes, "");
  const auto is_tensor = [](const Value& item) { return item.is(Kind::tensor); };
  if (!items || items->empty() || items->size() != attributes.size() ||
      !std::ranges::all_of(*items, is_tensor))
    return std::nullopt;
  return items->size() == 1 ? items->front() : Value::list(*items);
}

}  // namespace

Script script_of(const Value& data, const Value& constants, const CodeOf& code_of) {
  const Value* const attributes = attributes_in(data);
  if (attributes == nullptr) return {data, {}};
  if (auto optimizer = optimizer_of(*attributes)) return {std::move(*optimizer), {}};
  if (auto tensors = numbered_tensors(data, *attributes)) return {std::move(*tensors), {}};
  Names names{Classes(code_of)};
  names.add(data, *attributes, "");
  names.add_constants(constants);
  return names.take();
}

bool restore_typed(const Value& callable, const Value& arguments, Value& result) {
  constexpr std::array<std::string_view, 4> kLists{"build_intlist", "build_doublelist",
                                                   "build_boollist", "build_tensorlist"};
  constexpr std::string_view kModule = "torch.jit._pickle";
  if (!callable.is(Kind::global) || callable.global_module() != kModule) return false;
  const bool is_tag = callable.global_name() == "restore_type_tag";
  const bool is_list = std::ranges::find(kLists, callable.global_name()) != kLists.end();
  if (!arguments.is(Kind::tuple) || arguments.size() != (is_tag ? 2U : 1U)) return false;
  if (!is_tag && (!is_list || !arguments.items()[0].is(Kind::list))) return false;
  result = arguments.items()[0];
  return true;
}

}  // namespace tessera::torch_file
