#include "format/torch/modules.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/text.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/equality.h"
#include "value/render.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

// Bytes of names, and for each name and module about what it takes: a module may be in several
// places, and hold others that are, too.
constexpr std::uint64_t kMostText = 128 << 20;
constexpr std::uint64_t kEntry = 128;

// The parts of a module: dicts by name, and the dict of attributes that has them.
struct Parts {
  const Value* parameters = nullptr;
  const Value* buffers = nullptr;
  const Value* modules = nullptr;
  const Value* attributes = nullptr;
};

const Value* item_at(const Value& value, std::size_t index) {
  return value.is(Kind::tuple) && value.size() > index ? &value.items()[index] : nullptr;
}

// The module that one of torch.compile compiles.
const Value* compiled_in(const Value& value) {
  if (!value.is(Kind::object)) return nullptr;
  const Object& object = value.as_object();
  return is_global(object.callable, "torch._dynamo.eval_frame", "OptimizedModule")
             ? item_at(object.arguments, 0)
             : nullptr;
}

// The dict of attributes of an object: its state, with one of its slots perhaps, or what a function
// of torch.fx makes it from.
const Value* attributes_of(const Object& object) {
  if (object.callable.is(Kind::global) &&
      object.callable.global_module() == "torch.fx.graph_module")
    return item_at(object.arguments, 0);
  if (!object.state) return nullptr;
  return object.state->is(Kind::tuple) ? item_at(*object.state, 0) : &*object.state;
}

bool has_names_alone(const Value& dict) {
  return std::ranges::all_of(dict.pairs(),
                             [](const Value::Pair& pair) { return pair.first.is(Kind::string); });
}

// None: it is no module.
std::optional<Parts> parts_of(const Value& value) {
  if (!value.is(Kind::object)) return std::nullopt;
  const Value* const attributes = attributes_of(value.as_object());
  if (attributes == nullptr) return std::nullopt;
  const auto dict = [attributes](std::string_view name) {
    const Value* found = find_entry_of_kind(*attributes, name, Kind::dict);
    return found != nullptr && has_names_alone(*found) ? found : nullptr;
  };
  const Parts parts{dict("_parameters"), dict("_buffers"), dict("_modules"), attributes};
  if (parts.parameters == nullptr || parts.buffers == nullptr || parts.modules == nullptr)
    return std::nullopt;
  return parts;
}

bool is_module(const Value& value) {
  const Value* const compiled = compiled_in(value);
  return compiled != nullptr ? is_module(*compiled) : parts_of(value).has_value();
}

std::string class_of(const Value& value) {
  if (value.is(Kind::object) && !value.as_object().name().empty())
    return printable(value.as_object().name(), 200);
  return std::string(describe(value.kind()));
}

// Classes of torch whose state_dict() has more than parameters and buffers.
bool has_state_of_its_own(const Object& object) {
  const std::string name = object.name();
  return name.starts_with("torch.") && name.find(".quantized.") != std::string::npos;
}

// Walks one module.
class State {
 public:
  // False: `why` says what is in the way.
  bool add(const Value& module, const std::string& prefix) {
    count(prefix.size());
    if (const Value* const compiled = compiled_in(module))
      return add(*compiled, prefix + "_orig_mod.");
    const std::optional<Parts> parts = parts_of(module);
    if (!parts || has_state_of_its_own(module.as_object())) {
      why_ = (prefix.empty() ? "it" : printable(prefix.substr(0, prefix.size() - 1), 200)) +
             " is a " + class_of(module) + ", whose names only its code knows";
      return false;
    }
    note_hooks(*parts->attributes);
    add_entries(*parts->parameters, nullptr, prefix);
    add_entries(*parts->buffers, parts->attributes->find("_non_persistent_buffers_set"), prefix);
    return std::ranges::all_of(parts->modules->pairs(), [&](const Value::Pair& child) {
      return child.second.is(Kind::none) ||
             add(child.second, prefix + child.first.as_string() + ".");
    });
  }

  [[nodiscard]] Value take() { return Value::dict(std::move(pairs_), DictKind::ordered_dict); }
  [[nodiscard]] const std::string& why() const { return why_; }
  [[nodiscard]] bool has_hooks() const { return has_hooks_; }

 private:
  void count(std::size_t name) {
    text_ += name + kEntry;
    if (text_ <= kMostText) return;
    throw Error(ErrorCode::limit, "the names of a module are more than " +
                                      std::to_string(kMostText >> 20U) + " MiB of text");
  }

  // `left_out`: names, as a set.
  void add_entries(const Value& dict, const Value* left_out, const std::string& prefix) {
    std::unordered_set<std::string_view> without;
    if (left_out != nullptr && is_sequence(left_out->kind())) {
      for (const Value& name : left_out->items())
        if (name.is(Kind::string)) without.insert(name.as_string());
    }
    for (const auto& [key, value] : dict.pairs()) {
      if (value.is(Kind::none) || without.contains(key.as_string())) continue;
      count(prefix.size() + key.as_string().size());
      pairs_.emplace_back(prefix + key.as_string(), detached(value));
    }
  }

  void note_hooks(const Value& attributes) {
    for (const char* name : {"_state_dict_hooks", "_state_dict_pre_hooks"}) {
      const Value* hooks = find_entry_of_kind(attributes, name, Kind::dict);
      has_hooks_ = has_hooks_ || (hooks != nullptr && hooks->size() > 0);
    }
  }

  std::vector<Value::Pair> pairs_;
  std::string why_;
  std::uint64_t text_ = 0;
  bool has_hooks_ = false;
};

// Goes through a tree.
class Replacement {
 public:
  void visit(Value& value) {
    if (is_module(value)) {
      replace(value);
    } else if (seen_.insert(value.identity()).second) {
      walk(value);
    }
  }

  [[nodiscard]] std::vector<std::string> take() { return std::move(lines_); }

 private:
  void walk(Value& value) {
    if (is_one_of(value.kind(), Kind::list, Kind::tuple)) {
      for (std::size_t i = 0; i < value.size(); ++i) visit_at(value.items()[i], std::to_string(i));
    } else if (value.is(Kind::dict)) {
      for (std::size_t i = 0; i < value.size(); ++i) {
        const auto& [key, old] = value.pairs()[i];
        if (!is_container(old.kind())) continue;
        Value item = old;
        visit_at(item, key_text(key));
        if (item.identity() != old.identity()) value.set_item(Value(key), std::move(item));
      }
    }
  }

  void visit_at(Value& value, std::string step) {
    way_.push_back(std::move(step));
    visit(value);
    way_.pop_back();
  }

  void replace(Value& module) {
    const auto [known, fresh] = states_.try_emplace(module.identity(), module, module);
    auto& [whole, made] = known->second;
    if (fresh) {
      State state;
      const bool is_known = state.add(whole, "");
      lines_.push_back(text_of(whole, state, is_known));
      if (is_known) made = state.take();
    }
    module = made;
  }

  [[nodiscard]] std::string text_of(const Value& module, const State& state, bool is_known) const {
    std::string place;
    for (const std::string& step : way_) place += (place.empty() ? "" : ".") + step;
    const std::string text = (way_.empty() ? "the file" : printable(place, 200)) +
                             " is a whole module, " + class_of(module) + ": ";
    if (!is_known) return text + "left as it was pickled, because " + state.why();
    return text +
           "its names are those that torch.nn.Module's state_dict() gives; --raw shows it as it "
           "was "
           "pickled" +
           (state.has_hooks() ? "; hooks that may change its state_dict() did not run" : "");
  }

  std::vector<std::string> lines_;
  std::vector<std::string> way_;  // to what is visited
  // A module, and what takes its place, by the identity that it keeps as long as it is here.
  std::unordered_map<const void*, std::pair<Value, Value>> states_;
  std::unordered_set<const void*> seen_;
};

}  // namespace

Value detached(const Value& value) {
  if (!value.is(Kind::tensor)) return value;
  Tensor tensor = value.as_tensor();
  tensor.parameter = tensor.requires_grad = false;
  tensor.attributes = nullptr;
  return Value(std::move(tensor));
}

std::vector<std::string> replace_modules(Value& tree) {
  Replacement replacement;
  replacement.visit(tree);
  return replacement.take();
}

}  // namespace tessera::torch_file
