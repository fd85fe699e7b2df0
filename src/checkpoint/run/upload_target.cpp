#include "checkpoint/run/upload_target.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/look_again.h"
#include "base/stop.h"
#include "checkpoint/open/belonging.h"
#include "checkpoint/run/marker.h"
#include "checkpoint/save/data_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::set<std::string> names_of(const UploadPlan& plan) {
  std::set<std::string> names;
  for (const UploadFile& file : plan) names.insert(file.object.name);
  return names;
}

void withdraw_if(Store& store, const UploadPlan& plan, auto is_mine) noexcept {
  const Settling settling;  // also of an upload that was stopped
  try {
    if (!marker_in(store).empty()) return;
  } catch (const Error&) {
    return;  // it does not answer
  }
  for (const UploadFile& file : plan) {
    if (is_mine(file)) remove_quietly(store, file.object.name);
  }
}

}  // namespace

void UploadTarget::open(bool overwrite) {
  if (!overwrite) require_no_marker(store_);
  std::vector<ObjectInfo> markers = look(overwrite);
  sort_markers_last(markers);
  for (auto at = markers.rbegin(); at != markers.rend(); ++at) store_.remove(at->name);
  store_.sync();
}

void UploadTarget::open_same(bool overwrite) {
  (void)look(overwrite);
}

std::vector<ObjectInfo> UploadTarget::look(bool overwrite) {
  const std::set<std::string> planned = names_of(plan_);
  const std::vector<ObjectInfo> objects = store_.list();
  const Belonging belongs(store_, objects);
  std::vector<ObjectInfo> markers;
  for (const ObjectInfo& object : objects) {
    if (is_marker(object.name)) {
      markers.push_back(object);
    } else if (!planned.contains(object.name) && belongs(object.name)) {
      stale_.push_back(object.name);
    }
  }
  if (!stale_.empty() && !overwrite) {
    throw Error(ErrorCode::already_exists,
                "data of another checkpoint is there already: " + stale_.front())
        .at_path(store_.name());
  }
  return markers;
}

void UploadTarget::remove_stale() {
  for (const std::string& name : stale_) store_.remove(name);
}

void UploadTarget::require_data() const {
  std::string missing;
  const bool all = look_again([&] {
    std::map<std::string, std::uint64_t> there;
    for (const ObjectInfo& object : store_.list()) there.emplace(object.name, object.size);
    const auto absent = std::ranges::find_if(plan_, [&](const UploadFile& file) {
      const auto found = there.find(file.object.name);
      return !is_marker(file.object.name) &&
             (found == there.end() || found->second != file.object.size);
    });
    missing = absent == plan_.end() ? "" : absent->object.name;
    return missing.empty();
  });
  if (all) return;
  throw Error(ErrorCode::incomplete,
              "rank 0 does not find what a rank has copied: do the ranks write into different "
              "directories, or to disks of their own?")
      .at_path(store_.name() + "/" + missing);
}

void UploadTarget::withdraw() noexcept {
  withdraw_if(store_, plan_, [](const UploadFile&) { return true; });
}

void withdraw(Store& store, const UploadPlan& plan, int rank) noexcept {
  withdraw_if(store, plan, [rank](const UploadFile& file) { return file.rank == rank; });
}

}  // namespace tessera
