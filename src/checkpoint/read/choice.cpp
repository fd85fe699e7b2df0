#include "checkpoint/read/choice.h"

#include <fnmatch.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/suggest.h"
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
  const bool there = add_from(key, [&key](std::string_view name) { return name == key; });
  const std::string below = key + ".";
  const bool above =
      add_from(below, [&below](std::string_view name) { return name.starts_with(below); });
  return there || above || add_glob(key);
}

bool Choice::add_glob(const std::string& glob) {
  if (glob.find_first_of("*?[") == std::string::npos) return false;
  return add_if(
      [&glob](const Leaf& leaf) { return ::fnmatch(glob.c_str(), leaf.name.c_str(), 0) == 0; });
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

// What somebody may have meant: a name with a slip in it, or one below something. Empty: none.
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
    what += ", did you mean '" + printable(other) + "'?";
  throw Error(ErrorCode::not_found, what).at_key(printable(key)).at_path(path);
}

}  // namespace tessera
