#include "checkpoint/run/step_names.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "base/random_id.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/step_name.h"
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
