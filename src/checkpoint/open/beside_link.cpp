#include "checkpoint/open/beside_link.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/open/open.h"
#include "checkpoint/open/step_name.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

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
  std::vector<StepName> steps;
  for (const DirectoryEntry& entry : readable_entries_of(directory_of(link))) {
    std::string_view rest = entry.name;
    const auto step = take_step_name(rest);
    if (step && rest.empty() && entry.is_directory) steps.push_back(*step);
  }
  // Of one step the sharded one comes first, as for who asks a run for its latest.
  std::ranges::sort(steps, {},
                    [](const StepName& step) { return std::pair(-step.step, step.unsharded); });
  const auto newest = std::ranges::find_if(steps, [&](const StepName& step) {
    return opens(directory_of(link) + "/" + to_string(step));
  });
  return newest == steps.end() ? std::string() : to_string(*newest);
}

}  // namespace tessera
