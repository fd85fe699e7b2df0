#include "value/depth.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

bool is_sequence(const Value& value) {
  return value.is(Kind::list) || value.is(Kind::tuple) || value.is(Kind::set) ||
         value.is(Kind::frozenset);
}

// Calls `visit(child, name)` for the children that may hold others; `name()` is made when asked
// for.
template <typename Visit>
void for_each_container(const Value& value, Visit visit) {
  const auto offer = [&visit](const Value& child, const auto& name) {
    const bool holds = is_sequence(child) || child.is(Kind::dict) || child.is(Kind::object) ||
                       (child.is(Kind::tensor) && child.as_tensor().attributes);
    if (holds) visit(child, name);
  };
  const auto offer_all = [&offer](const std::vector<Value>& children) {
    for (std::size_t i = 0; i < children.size(); ++i)
      offer(children[i], [i] { return std::to_string(i); });
  };
  const auto offer_pairs = [&offer](const std::vector<Value::Pair>& pairs) {
    for (const auto& [key, child] : pairs) {
      offer(key, [] { return std::string("a key"); });
      offer(child, [&key = key] { return key_text(key); });
    }
  };
  const auto named = [](const char* name) { return [name] { return std::string(name); }; };
  if (is_sequence(value)) {
    offer_all(value.items());
  } else if (value.is(Kind::dict)) {
    offer_pairs(value.pairs());
    if (const Value* state = value.container_state()) offer(*state, named("state"));
    if (const Value* factory = value.default_factory()) offer(*factory, named("default_factory"));
  } else if (value.is(Kind::tensor)) {
    if (const auto& attributes = value.as_tensor().attributes)
      offer(*attributes, named("attributes"));
  } else if (value.is(Kind::object)) {
    const Object& object = value.as_object();
    offer(object.callable, named("callable"));
    offer(object.arguments, named("arguments"));
    if (object.keywords) offer(*object.keywords, named("keywords"));
    if (object.state) offer(*object.state, named("state"));
    offer_all(object.list_items);
    offer_pairs(object.dict_items);
  }
}

// A walk that keeps its way on the heap.
class Walk {
 public:
  void run(const Value& root) {
    enter(root);
    while (!way_.empty()) {
      Step& step = way_.back();
      if (step.next < step.children.size()) {
        enter(*step.children[step.next++]);
        continue;
      }
      const std::size_t levels = step.levels + 1;
      levels_[step.value->identity()] = levels;
      way_.pop_back();
      if (!way_.empty()) way_.back().levels = std::max(way_.back().levels, levels);
    }
  }

 private:
  static constexpr std::size_t kOpen = 0;   // of a node on the way
  static constexpr std::size_t kNamed = 8;  // steps that a message names

  struct Step {
    const Value* value;
    std::vector<const Value*> children;
    std::size_t next = 0;
    std::size_t levels = 0;  // below it, as far as known
  };

  void enter(const Value& value) {
    const auto [known, is_new] = levels_.emplace(value.identity(), kOpen);
    if (!is_new && known->second == kOpen && value.identity() != nullptr) {
      throw Error(ErrorCode::invalid_argument, "the value contains itself").at_key(place());
    }
    const std::size_t below = is_new ? 1 : known->second;
    if (way_.size() + below > kMaxLevels) {
      throw Error(ErrorCode::limit,
                  "values are nested deeper than " + std::to_string(kMaxLevels) + " levels")
          .at_key(place());
    }
    if (!is_new) {
      if (!way_.empty()) way_.back().levels = std::max(way_.back().levels, below);
      return;
    }
    Step step{&value, {}};
    for_each_container(value,
                       [&](const Value& child, const auto&) { step.children.push_back(&child); });
    way_.push_back(std::move(step));
  }

  // The first steps to where the walk is.
  [[nodiscard]] std::string place() const {
    std::string text;
    for (std::size_t i = 0; i < std::min(way_.size(), kNamed); ++i) {
      const Value* taken = way_[i].children[way_[i].next - 1];
      for_each_container(*way_[i].value, [&](const Value& child, const auto& name) {
        if (&child == taken) text += (text.empty() ? "" : ".") + name();
      });
    }
    return printable(text) + (way_.size() > kNamed ? "..." : "");
  }

  std::vector<Step> way_;
  std::unordered_map<const void*, std::size_t> levels_;  // by node: its levels, or kOpen
};

}  // namespace

void require_walkable(const Value& value) {
  Walk().run(value);
}

}  // namespace tessera
