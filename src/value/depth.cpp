#include "value/depth.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

// Calls visit(child, name) for the children that may hold others.
template <typename Visit>
void for_each_container(const Value& value, Visit visit) {
  for_each_child(value, [&visit](const Value& child, const auto& name) {
    if (holds_others(child)) visit(child, name);
  });
}

std::vector<const Value*> containers_in(const Value& value) {
  std::vector<const Value*> children;
  for_each_container(value, [&](const Value& child, const auto&) { children.push_back(&child); });
  return children;
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
      note_levels(levels);
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
    require_levels(below);
    if (!is_new) return note_levels(below);
    way_.push_back({&value, containers_in(value)});
  }

  void require_levels(std::size_t below) const {
    if (way_.size() + below <= kMaxLevels) return;
    throw Error(ErrorCode::limit,
                "values are nested deeper than " + std::to_string(kMaxLevels) + " levels")
        .at_key(place());
  }

  // What the node before the one that was met last has below it.
  void note_levels(std::size_t levels) {
    if (!way_.empty()) way_.back().levels = std::max(way_.back().levels, levels);
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
