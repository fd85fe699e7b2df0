#include "checkpoint/open/beside_link.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/open/open.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kStep = "step", kUnsharded = "-unsharded";

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStep)) return {};
  name.remove_prefix(kStep.size());
  if (name.ends_with(kUnsharded)) name.remove_suffix(kUnsharded.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return {};
  return step;
}

bool opens(const std::string& path) {
  try {
    (void)open_checkpoint(posix_store(path), {});
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string newest_beside(const std::string& link) {
  std::vector<std::pair<std::int64_t, std::string>> steps;
  for (const DirectoryEntry& entry : readable_entries_of(directory_of(link))) {
    const std::optional<std::int64_t> step = step_of(entry.name);
    if (step && entry.is_directory) steps.emplace_back(*step, entry.name);
  }
  // Of one step the sharded one comes first, as for who asks a run for its latest.
  std::ranges::sort(steps, [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  const auto newest = std::ranges::find_if(
      steps, [&](const auto& step) { return opens(directory_of(link) + "/" + step.second); });
  return newest == steps.end() ? std::string() : newest->second;
}

}  // namespace tessera
