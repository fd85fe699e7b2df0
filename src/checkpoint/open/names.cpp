// A checkpoint's leaves by name.
#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "base/log.h"
#include "base/sort_runs.h"
#include "base/stop.h"
#include "checkpoint/open/open.h"
#include "storage/stopping_store.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

// Without an index.
const Leaf* find_leaf(const std::vector<Leaf>& leaves, std::string_view name) {
  const auto found = std::ranges::find(leaves, name, &Leaf::name);
  return found == leaves.end() ? nullptr : &*found;
}

bool matches(const std::string& name, const std::string& glob) {
  return glob == "*" || ::fnmatch(glob.c_str(), name.c_str(), 0) == 0;
}

}  // namespace

Checkpoint Checkpoint::open(const Location& where, const OpenOptions& options) {
  const HeedStop heeding(options.stop);
  Place place = place_of(where);
  place.store = stopping_store(std::move(place.store), options.stop);
  Checkpoint checkpoint = open_checkpoint(place, options);
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
  const auto add = [&](const Leaf& leaf) {
    if (leaf.value.is(Value::Kind::tensor) && matches(leaf.name, glob)) found.push_back(leaf.name);
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
    return leaf->value.as_tensor();
  } catch (Error& error) {
    throw error.at_key(printable(name)).at_path(path);
  }
}

}  // namespace tessera
