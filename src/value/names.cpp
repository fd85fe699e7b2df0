// What names of leaves tell about what they are.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "tessera/leaf.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::string_view kRank = "rank";

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// A step of a name that ends in the number of a rank: what stands in front of the number, and it.
std::optional<std::pair<std::string_view, int>> numbered_step(std::string_view step) {
  std::size_t digits = step.size();
  while (digits > 0 && is_digit(step[digits - 1])) --digits;
  const auto number = plain_number(step.substr(digits));
  if (!number) return std::nullopt;
  std::string_view word = step.substr(0, digits);
  if (word.ends_with('_')) word.remove_suffix(1);
  if (!word.ends_with(kRank)) return std::nullopt;
  const std::size_t before = word.size() - kRank.size();
  if (before > 0 && is_letter(word[before - 1])) return std::nullopt;  // "lowrank_4"
  return std::pair(step.substr(0, digits), *number);
}

// Whether `visit`, of a step and where it begins, is true for one of the name's steps, in order.
template <typename Visit>
bool any_step(std::string_view name, const Visit& visit) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (visit(name.substr(begin, end - begin), begin)) return true;
    begin = end + 1;
  }
  return false;
}

// The first step of a name that has a rank's number: the name up to the number, and it.
std::optional<std::pair<std::string, int>> rank_in(const std::string& name) {
  if (name.find(kRank) == std::string::npos) return std::nullopt;  // nearly all names
  std::optional<std::pair<std::string, int>> found;
  (void)any_step(name, [&](std::string_view step, std::size_t begin) {
    const auto numbered = numbered_step(step);
    if (numbered) found.emplace(name.substr(0, begin + numbered->first.size()), numbered->second);
    return numbered.has_value();
  });
  return found;
}

// "optim", "optimizer_0", "optimizers", "optim_state_dict", ..., and not "optimal_transport".
bool is_step_of_optimizer(std::string_view step) {
  constexpr std::string_view kShort = "optim", kLong = "izer";
  if (!step.starts_with(kShort)) return false;
  step.remove_prefix(kShort.size());
  if (step.starts_with(kLong)) step.remove_prefix(kLong.size());
  if (step.starts_with('s')) step.remove_prefix(1);
  return step.empty() || step.front() == '_' || is_digit(step.front());
}

// Ranks count from 0 on. "low_rank_1" and "low_rank_2" are no ranks.
bool are_all_ranks(const std::set<int>& numbers) {
  return !numbers.empty() && *numbers.begin() == 0 &&
         static_cast<std::size_t>(*numbers.rbegin()) + 1 == numbers.size();
}

std::map<std::string, std::set<int>> numbered_keys(const std::vector<std::string>& names) {
  std::map<std::string, std::set<int>> families;
  for (const std::string& name : names) {
    if (auto found = rank_in(name)) families[std::move(found->first)].insert(found->second);
  }
  return families;
}

}  // namespace

bool is_optimizer_name(std::string_view name) {
  const auto is_optimizer = [](std::string_view step, std::size_t) {
    return is_step_of_optimizer(step);
  };
  if (any_step(name, is_optimizer)) return true;
  return name.ends_with(".exp_avg") || name.ends_with(".exp_avg_sq");
}

std::map<std::string, std::set<int>> keys_of_ranks(const std::vector<std::string>& names) {
  auto families = numbered_keys(names);
  std::erase_if(families, [](const auto& family) { return !are_all_ranks(family.second); });
  return families;
}

std::vector<std::string> notes_of_left_ranks(const std::vector<std::string>& taken,
                                             const std::vector<std::string>& left, int ranks) {
  std::vector<std::string> notes;
  const auto all_taken = numbered_keys(taken);
  for (const auto& [family, numbers] : numbered_keys(left)) {
    const auto here = all_taken.find(family);
    if (here == all_taken.end()) continue;
    std::set<int> all = numbers;
    all.insert(here->second.begin(), here->second.end());
    const std::size_t most = here->second.size() * static_cast<std::size_t>(ranks);
    // What is left may be parts of ranks that were taken.
    if (!are_all_ranks(all) || all.size() <= most) continue;
    const std::string key = printable(family, 200);
    std::string note = "the checkpoint has ";
    note.append(key).append(std::to_string(*all.begin())).append(" to ").append(key);
    note.append(std::to_string(*all.rbegin())).append(", what ").append(std::to_string(all.size()));
    note.append(" ranks had of their own: ").append(ranks > 1 ? "at most " : "");
    note.append(std::to_string(most))
        .append(" of these are loaded, and nobody goes on with the others");
    notes.push_back(std::move(note));
  }
  return notes;
}

}  // namespace tessera
