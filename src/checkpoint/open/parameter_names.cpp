#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string_view>

#include "base/expression.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/sort_runs.h"
#include "base/text.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/read/missing.h"
#include "storage/forwarding_store.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/render.h"

namespace tessera {

// A checkpoint's leaves by name.

namespace {

// Without an index.
const Leaf* find_leaf(const std::vector<Leaf>& leaves, std::string_view name) {
  const auto found = std::ranges::find(leaves, name, &Leaf::name);
  return found == leaves.end() ? nullptr : &*found;
}

}  // namespace

Checkpoint Checkpoint::open(const Location& where, const OpenOptions& options) {
  const HeedStop heeding(options.stop);
  await_saves(where, Looks::at_place, options.stop);
  Place place = place_of(where);
  place.store = stopping_store(std::move(place.store), options.stop);
  Checkpoint checkpoint = open_checkpoint(place, options);
  require_presence_used(options, checkpoint.kind, checkpoint.path);
  checkpoint.index_names();
  say_warnings(checkpoint);
  return checkpoint;
}

void say_warnings(const Checkpoint& checkpoint) {
  for (const std::string& warning : checkpoint.warnings)
    log(LogLevel::warning, printable(checkpoint.path) + ": " + printable(warning));
}

void index_names(Checkpoint& checkpoint) {
  checkpoint.index_names();
}

void Checkpoint::index_names() {
  by_name_.resize(leaves.size());
  std::iota(by_name_.begin(), by_name_.end(), std::uint32_t{0});
  sort_runs(by_name_,
            [this](std::uint32_t a, std::uint32_t b) { return leaves[a].name < leaves[b].name; });
}

const Leaf* Checkpoint::find(std::string_view name) const {
  if (by_name_.size() != leaves.size()) return find_leaf(leaves, name);
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [this](std::uint32_t at, std::string_view wanted) { return leaves[at].name < wanted; });
  if (found == by_name_.end() || leaves[*found].name != name) return nullptr;
  return &leaves[*found];
}

std::vector<std::string> Checkpoint::names(const std::string& glob) const {
  std::vector<std::string> found;
  const Glob compiled(glob);
  const auto add = [&](const Leaf& leaf) {
    if (!leaf.value.is(Value::Kind::tensor) && !is_missing_tensor(leaf.value)) return;
    if (glob == "*" || compiled.fits(leaf.name)) found.push_back(leaf.name);
  };
  if (by_name_.size() == leaves.size()) {
    for (const std::uint32_t i : by_name_) add(leaves[i]);
  } else {
    std::ranges::for_each(leaves, add);
    std::sort(found.begin(), found.end());
  }
  return found;
}

const Tensor& Checkpoint::tensor(std::string_view name) const& {
  const Leaf* leaf = find(name);
  try {
    if (leaf == nullptr) throw Error(ErrorCode::not_found, "the checkpoint has no such tensor");
    if (is_missing_value(leaf->value)) throw missing_file(leaf->value)->missing();
    return leaf->value.as_tensor();
  } catch (Error& error) {
    throw error.at_key(printable(name)).at_path(path);
  }
}

namespace {

// Takes the text before the next dot from the front of `rest`; none: there is no dot.
std::optional<std::string_view> take_step(std::string_view& rest) {
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view step = rest.substr(0, dot);
  rest.remove_prefix(dot + 1);
  return step;
}

struct GroupedBlock {
  std::int64_t group = 0;  // both are plain numbers: their product does not overflow
  std::int64_t index = 0;
  std::string_view rest;
};

// "groups.G.I.REST" taken apart; none: `name` is of no block in groups.
std::optional<GroupedBlock> grouped_block(std::string_view name, const BlockRule& rule) {
  if (!name.starts_with(rule.groups + ".")) return std::nullopt;
  name.remove_prefix(rule.groups.size() + 1);
  const auto first = take_step(name);
  const auto second = take_step(name);
  if (!first || !second) return std::nullopt;
  const auto group = plain_number(*first);
  const auto index = plain_number(*second);
  if (!group || !index) return std::nullopt;
  return GroupedBlock{*group, *index, name};
}

// Names of one side, by which those of the other side are found: without wrappers, and with all
// blocks in one list.
class Canonical {
 public:
  Canonical(const std::vector<std::string>& names, const NameRules& rules)
      : rules_(rules), sizes_(rules.blocks.size(), 1) {
    for (const std::string& name : names) {
      const std::string clean = without_wrappers(name, rules);
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        const auto block = grouped_block(clean, rules.blocks[i]);
        if (block) sizes_[i] = std::max(sizes_[i], block->index + 1);
      }
    }
  }

  [[nodiscard]] std::string of(const std::string& name) const {
    std::string clean = without_wrappers(name, rules_);
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      const auto block = grouped_block(clean, rules_.blocks[i]);
      if (!block) continue;
      const std::int64_t number = block->group * sizes_[i] + block->index;
      return rules_.blocks[i].list + "." + std::to_string(number) + "." + std::string(block->rest);
    }
    return clean;
  }

 private:
  const NameRules& rules_;
  std::vector<std::int64_t> sizes_;  // of groups, by rule
};

// A pattern around its `*`, if it has one.
struct Pattern {
  explicit Pattern(const std::string& text)
      : before(text.substr(0, text.find('*'))), star(before.size() < text.size()) {
    if (star) after = text.substr(before.size() + 1);
    if (after.find('*') != std::string::npos)
      throw Error(ErrorCode::invalid_argument, "a name's rule has more than one *: " + text);
  }

  // What the `*` stands for in `name`; none: the name is another one.
  [[nodiscard]] std::optional<std::string> match(const std::string& name) const {
    if (!star) return name == before ? std::optional(std::string()) : std::nullopt;
    const std::size_t ends = before.size() + after.size();
    if (name.size() < ends || !name.starts_with(before) || !name.ends_with(after))
      return std::nullopt;
    return name.substr(before.size(), name.size() - ends);
  }
  [[nodiscard]] std::string with(const std::string& text) const { return before + text + after; }

  std::string before;
  bool star;
  std::string after = {};
};

using NameByName = std::map<std::string, std::string>;

const std::string* find_in(const NameByName& names, const std::string& name) {
  const auto found = names.find(name);
  return found == names.end() ? nullptr : &found->second;
}

// What the rule leads to from a live name.
const std::string* find_by(const NameRule& rule, const std::string& live,
                           const NameByName& stored) {
  for (const std::string& pattern : rule.live) {
    const auto text = Pattern(pattern).match(live);
    if (!text) continue;
    if (const std::string* found = find_in(stored, Pattern(rule.stored).with(*text))) return found;
  }
  return nullptr;
}

const std::string* find_stored(const std::string& live, const NameByName& stored,
                               const NameRules& rules) {
  if (const std::string* same = find_in(stored, live)) return same;
  for (const NameRule& rule : rules.renamed) {
    if (const std::string* found = find_by(rule, live, stored)) return found;
  }
  return nullptr;
}

}  // namespace

NameRules olmo_name_rules() {
  NameRules rules;
  rules.wrappers = {"_fsdp_wrapped_module."};
  rules.blocks = {{"transformer.blocks", "transformer.block_groups"}};
  for (const std::string kind : {"weight", "bias"}) {
    rules.renamed.push_back({"transformer.*.norm." + kind,
                             {"transformer.*.attn_norm." + kind, "transformer.*.ff_norm." + kind}});
  }
  return rules;
}

std::string without_wrappers(std::string name, const NameRules& rules) {
  for (const std::string& wrapper : rules.wrappers) {
    if (wrapper.empty()) continue;
    for (std::size_t at = name.find(wrapper); at != std::string::npos; at = name.find(wrapper, at))
      name.erase(at, wrapper.size());
  }
  return name;
}

std::map<std::string, std::string> match_names(const std::vector<std::string>& stored,
                                               const std::vector<std::string>& live,
                                               const NameRules& rules) {
  const Canonical canonical_stored(stored, rules);
  const Canonical canonical_live(live, rules);
  NameByName by_canonical;
  for (const std::string& name : stored) {
    const auto [found, added] = by_canonical.emplace(canonical_stored.of(name), name);
    if (!added && found->second != name) {
      throw Error(ErrorCode::conflict,
                  "two stored names are of this parameter: " + found->second + " and " + name)
          .at_key(found->first);
    }
  }
  std::map<std::string, std::string> matched;
  for (const std::string& name : live) {
    const std::string* found = find_stored(canonical_live.of(name), by_canonical, rules);
    if (found != nullptr) matched.emplace(name, *found);
  }
  return matched;
}

}  // namespace tessera
