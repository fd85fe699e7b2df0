#include "checkpoint/run/step_names.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "base/parallel.h"
#include "base/random_id.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/step_name.h"
#include "checkpoint/run/marker.h"
#include "storage/names.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Role = StepDirectory::Role;

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::optional<Role> role_of(std::string_view suffix) {
  if (suffix.empty()) return Role::current;
  const bool is_old = take_prefix(suffix, kOldMark);
  if ((is_old || take_prefix(suffix, kWorkMark)) && is_attempt(suffix))
    return is_old ? Role::replaced : Role::attempt;
  return std::nullopt;
}

std::optional<StepDirectory> parse(const std::string& name) {
  std::string_view rest = name;
  const auto step = take_step_name(rest);
  if (!step) return std::nullopt;
  const auto role = role_of(rest);
  if (!role) return std::nullopt;
  return StepDirectory{step->step, step->unsharded, *role, name};
}

bool is_same_name(const StepDirectory& a, const StepDirectory& b) {
  return a.step == b.step && a.unsharded == b.unsharded;
}

}  // namespace

std::vector<StepDirectory> step_directories(const Location& run) {
  std::vector<StepDirectory> found;
  for (const std::string& name : directory_store(run)->list_directories()) {
    if (auto directory = parse(name)) found.push_back(std::move(*directory));
  }
  std::ranges::stable_sort(found, {}, [](const StepDirectory& directory) {
    return std::tuple(-directory.step, directory.unsharded, directory.role);
  });
  return found;
}

std::vector<StepDirectory> standing(std::vector<StepDirectory> directories) {
  std::erase_if(directories, [](const StepDirectory& one) { return one.role == Role::attempt; });
  std::vector<StepDirectory> found;
  for (auto at = directories.begin(); at != directories.end();) {
    const auto next = std::find_if_not(
        at, directories.end(), [&](const StepDirectory& one) { return is_same_name(one, *at); });
    if (at->role == Role::current || next - at == 1) found.push_back(*at);
    at = next;
  }
  return found;
}

std::vector<StepDirectory> marked(const Location& run, std::vector<StepDirectory> directories) {
  constexpr int kAskedAtOnce = 16;
  std::vector<char> has_marker(directories.size(), 0);
  parallel_for(is_on_disk(run) ? 1 : kAskedAtOnce, directories.size(), [&](std::size_t i) {
    const auto store = directory_store(directory_in(run, directories[i].directory));
    has_marker[i] = marker_in(*store).empty() ? 0 : 1;
  });
  std::vector<StepDirectory> found;
  for (std::size_t i = 0; i < directories.size(); ++i)
    if (has_marker[i] != 0) found.push_back(std::move(directories[i]));
  return found;
}

std::string run_checkpoint_name(std::int64_t step, bool unsharded) {
  if (step < 0) {
    throw Error(ErrorCode::invalid_argument,
                "a step is a number from 0 up, not " + std::to_string(step));
  }
  return to_string(StepName{step, unsharded});
}

RunCheckpoint run_checkpoint(const Location& run, std::int64_t step, bool unsharded) {
  return {step, unsharded, directory_in(run, run_checkpoint_name(step, unsharded))};
}

}  // namespace tessera
