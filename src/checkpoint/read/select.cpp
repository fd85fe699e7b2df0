#include "checkpoint/read/select.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <string_view>

#include "base/expression.h"
#include "base/text.h"
#include "checkpoint/read/cast.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {

Choice::Choice(const std::vector<Leaf>& leaves) : leaves_(leaves), chosen_(leaves.size(), false) {}

void Choice::sort_names() {
  if (!by_name_.empty()) return;
  by_name_.resize(leaves_.size());
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  std::ranges::sort(by_name_, {}, [this](std::size_t at) { return name_at(at); });
}

// Chooses the leaves from the first name that is not before `first` on, while `fits`.
template <typename Fits>
bool Choice::add_from(std::string_view first, const Fits& fits) {
  auto at = std::ranges::lower_bound(by_name_, first, {},
                                     [this](std::size_t leaf) { return name_at(leaf); });
  const auto begin = at;
  for (; at != by_name_.end() && fits(name_at(*at)); ++at) chosen_[*at] = true;
  return at != begin;
}

bool Choice::add(const std::string& key) {
  sort_names();
  if (add_named(key)) return true;
  const auto printed = printed_name(key);
  return (printed && add_named(*printed)) || add_glob(key) || (printed && add_glob(*printed));
}

bool Choice::add_printed(const std::string& key) {
  sort_names();
  const auto printed = printed_name(key);
  return (printed && add_named(*printed)) || add(key);
}

bool Choice::add_named(const std::string& name) {
  const bool there = add_from(name, [&name](std::string_view other) { return other == name; });
  const std::string below = name + ".";
  const bool above =
      add_from(below, [&below](std::string_view other) { return other.starts_with(below); });
  return there || above;
}

bool Choice::add_glob(const std::string& glob) {
  if (glob.find_first_of("*?[") == std::string::npos) return false;
  const Glob compiled(glob);
  return add_if([&compiled](const Leaf& leaf) { return compiled.fits(leaf.name); });
}

namespace {

// All names, and what stands before their dots.
std::vector<std::string> keys_of(const std::vector<Leaf>& leaves) {
  std::set<std::string> keys;
  for (const Leaf& leaf : leaves) {
    for (std::size_t dot = leaf.name.find('.'); dot != std::string::npos;
         dot = leaf.name.find('.', dot + 1)) {
      keys.insert(leaf.name.substr(0, dot));
    }
    keys.insert(leaf.name);
  }
  return {keys.begin(), keys.end()};
}

// The names that somebody may have meant: a name with a slip in it, or one below something. Empty:
// none.
std::string meant(const std::string& key, const std::vector<Leaf>& leaves) {
  const std::vector<std::string> keys = keys_of(leaves);
  if (std::string near = nearest(key, keys); !near.empty()) return near;
  const std::string end = "." + key;
  const auto below =
      std::ranges::find_if(keys, [&end](const std::string& name) { return name.ends_with(end); });
  return below == keys.end() ? std::string() : *below;
}

}  // namespace

void refuse_key(const std::string& key, const std::vector<Leaf>& leaves, const std::string& path) {
  std::string what = "the checkpoint has no such key and none that begins with it";
  if (const std::string other = meant(key, leaves); !other.empty())
    what += ", did you mean '" + printable_name(other) + "'?";
  throw Error(ErrorCode::not_found, what).at_key(printable(key)).at_path(path);
}

namespace {

constexpr std::string_view kArrow = "=>";
// Bytes: finding all matches may take the square of this.
constexpr std::size_t kLongestName = 4096;

bool is_one(const PathPart& part, std::span<const std::string_view> names) {
  const auto* key = std::get_if<std::string>(&part);
  return key != nullptr && std::ranges::find(names, *key) != names.end();
}

bool has_step(const Leaf& leaf, std::span<const std::string_view> names) {
  return std::ranges::any_of(leaf.path, [&](const PathPart& part) { return is_one(part, names); });
}

// Below such a step: a leaf "model" may be a model's name.
bool is_below(const Leaf& leaf, std::span<const std::string_view> names) {
  const auto steps = std::span(leaf.path).first(leaf.path.empty() ? 0 : leaf.path.size() - 1);
  return std::ranges::any_of(steps, [&](const PathPart& part) { return is_one(part, names); });
}

// Trees name their model's part; a file without such a part is a model but for its optimizer's.
bool is_model_state(const Leaf& leaf, bool named) {
  constexpr std::array<std::string_view, 3> kNames{"model", "state_dict", "model_state_dict"};
  return named ? is_below(leaf, kNames) : !is_optimizer_state(leaf);
}

// A file of a model alone may have names that begin with "model." and others beside them.
std::string note_of_unnamed_model(const std::vector<Leaf>& leaves) {
  const auto is_below = [](const Leaf& leaf) { return leaf.name.starts_with("model."); };
  const auto is_other = [&](const Leaf& leaf) {
    return !is_below(leaf) && !is_optimizer_state(leaf);
  };
  const auto others = std::ranges::count_if(leaves, is_other);
  if (others == 0 || std::ranges::none_of(leaves, is_below)) return "";
  return "no part of the checkpoint is called model, so 'model' is all that is no optimizer's, " +
         std::to_string(others) +
         (others == 1 ? " name that does not begin" : " names that do not begin") +
         " with 'model.' among it; 'model.*' is those that do";
}

// Returns whether the key adds any; what it may not have meant goes into `notes`.
bool add(Choice& choice, const std::vector<Leaf>& leaves, const std::string& key,
         std::vector<std::string>& notes) {
  if (key == "optim") return choice.add_if(is_optimizer_state);
  if (key != "model") return choice.add_printed(key);
  const bool is_named =
      std::ranges::any_of(leaves, [](const Leaf& leaf) { return is_model_state(leaf, true); });
  if (!is_named) {
    if (std::string note = note_of_unnamed_model(leaves); !note.empty()) notes.push_back(note);
  }
  return choice.add_if([=](const Leaf& leaf) { return is_model_state(leaf, is_named); });
}

// How many steps of the path `name` begins with; they are taken off it.
std::size_t take_front(std::string_view& name, const Path& path) {
  std::size_t count = 0;
  for (; count < path.size(); ++count) {
    const std::string step = step_text(path[count]) + ".";
    if (!name.starts_with(step)) break;
    name.remove_prefix(step.size());
  }
  return count;
}

// How many of the last steps of the path, `most` at most, `name` ends with; they are taken off it.
std::size_t take_back(std::string_view& name, const Path& path, std::size_t most) {
  std::size_t count = 0;
  for (; count < most; ++count) {
    const std::string step = step_text(path[path.size() - 1 - count]);
    if (name == step) {
      name = {};
      return count + 1;
    }
    if (!name.ends_with("." + step)) break;
    name.remove_suffix(step.size() + 1);
  }
  return count;
}

}  // namespace

void rename(Leaf& leaf, std::string name) {
  const Path& path = leaf.path;
  const std::size_t known = leaf.containers ? leaf.containers->size() : 0;
  const auto container = [&](std::size_t step) {
    return step < known ? (*leaf.containers)[step] : nullptr;
  };
  std::string_view rest = name;
  const std::size_t front = take_front(rest, path);
  const std::size_t back = path.size() - take_back(rest, path, path.size() - front);
  Path renamed(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(front));
  Containers containers;
  for (std::size_t step = 0; step < front; ++step) containers.push_back(container(step));
  if (!rest.empty()) {
    containers.push_back(container(front));
    renamed.emplace_back(std::string(rest));
  }
  for (std::size_t step = back; step < path.size(); ++step) {
    const bool moved = !rest.empty() && step == front;  // into a new dict
    containers.push_back(moved ? nullptr : container(step));
  }
  renamed.insert(renamed.end(), path.begin() + static_cast<std::ptrdiff_t>(back), path.end());
  if (known > 0) leaf.containers = std::make_shared<const Containers>(std::move(containers));
  leaf.path = std::move(renamed);
  leaf.name = std::move(name);
}

namespace {

struct Rule {
  Expression pattern;
  Expression::Replacement replacement;
  bool has_changed = false;  // a name
};

// The new names of a selection: each belongs to one leaf.
class NewNames {
 public:
  void add(const std::string& name, const std::string& old) {
    if (name.empty())
      throw Error(ErrorCode::conflict, "the rules leave nothing of the name").at_key(old);
    const auto [other, fresh] = origins_.emplace(name, old);
    if (!fresh) {
      throw Error(ErrorCode::conflict,
                  "the rules give '" + other->second + "' and '" + old + "' one name")
          .at_key(name);
    }
  }

 private:
  std::map<std::string, std::string> origins_;  // new name -> old name
};

Rule rule_of(const std::string& text) {
  const std::size_t arrow = text.find(kArrow);
  if (arrow == std::string::npos || arrow == 0)
    throw Error(ErrorCode::invalid_argument, "the rule '" + text + "' is not RE=>TO");
  try {
    Expression pattern(text.substr(0, arrow));
    Expression::Replacement to = pattern.replacement_of(text.substr(arrow + kArrow.size()));
    return {std::move(pattern), std::move(to), false};
  } catch (const Error& error) {
    throw Error(error.code(), "the rule '" + text + "': " + error.message());
  }
}

bool converts(DType from, DType to) {
  return from != to && info(from).floating && can_cast(from, to);
}

std::string applied(std::vector<Rule>& rules, std::string name) {
  for (Rule& rule : rules) {
    if (name.size() > kLongestName) {
      throw Error(ErrorCode::limit,
                  "names of more than " + std::to_string(kLongestName) + " bytes are not renamed")
          .at_key(name.substr(0, 100));
    }
    std::string renamed = rule.pattern.replaced(name, rule.replacement);
    rule.has_changed = rule.has_changed || renamed != name;
    name = std::move(renamed);
  }
  return name;
}

}  // namespace

bool is_optimizer_state(const Leaf& leaf) {
  constexpr std::array<std::string_view, 4> kNames{"optim", "optimizer", "optim_state_dict",
                                                   "optimizer_state_dict"};
  return has_step(leaf, kNames) || is_optimizer_name(leaf.name);
}

Selection select_what_is_there(const std::vector<Leaf>& leaves,
                               const std::vector<std::string>& only) {
  if (only.empty()) return {leaves, {}, {}};
  Selection chosen;
  Choice choice(leaves);
  for (const std::string& key : only) {
    if (!add(choice, leaves, key, chosen.notes)) chosen.unmatched.push_back(key);
  }
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (choice.has(i)) chosen.leaves.push_back(leaves[i]);
  }
  return chosen;
}

Selection select(const std::vector<Leaf>& leaves, const std::vector<std::string>& only,
                 const std::string& path) {
  Selection chosen = select_what_is_there(leaves, only);
  if (!chosen.unmatched.empty()) refuse_key(chosen.unmatched.front(), leaves, path);
  return chosen;
}

std::vector<std::string> rename(std::vector<Leaf>& leaves, const std::vector<std::string>& rules) {
  if (rules.empty()) return {};
  std::vector<Rule> parsed;
  std::transform(rules.begin(), rules.end(), std::back_inserter(parsed), rule_of);
  NewNames names;
  for (Leaf& leaf : leaves) {
    std::string name = applied(parsed, leaf.name);
    names.add(name, leaf.name);
    if (name != leaf.name) rename(leaf, std::move(name));
  }
  std::vector<std::string> notes;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const std::size_t second = rules[i].find(kArrow, rules[i].find(kArrow) + kArrow.size());
    if (second != std::string::npos)
      notes.push_back("the rule '" + rules[i] +
                      "' has a second '=>', which is text: the first one counts");
    if (!parsed[i].has_changed) notes.push_back("the rule '" + rules[i] + "' changes no name");
  }
  return notes;
}

void convert_floating(std::vector<Leaf>& leaves, DType dtype) {
  for (Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    Tensor tensor = leaf.value.as_tensor();
    if (!converts(tensor.dtype, dtype)) continue;
    if (!tensor.stored) tensor.stored = tensor.dtype;
    tensor.dtype = dtype;
    leaf.value = Value(std::move(tensor));
  }
}

}  // namespace tessera
