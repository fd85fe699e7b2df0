// The directory that a checkpoint is copied to.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/run/upload_plan.h"
#include "tessera/storage.h"

namespace tessera {

// On rank 0. `plan` must outlive it.
class UploadTarget {
 public:
  UploadTarget(Store& store, const UploadPlan& plan) : store_(store), plan_(plan) {}

  // Looks at what is there, and removes the markers. Throws `already_exists` unless `overwrite`.
  void open(bool overwrite);
  // Instead, if what is there has the markers of the plan: they stay.
  void open_same(bool overwrite);
  // Removes what is of a checkpoint and not of the new one. After open().
  void remove_stale();
  // Throws `incomplete` unless all data of the plan is there with its size.
  void require_data() const;
  // After a failure: removes all that the plan has, unless there is a marker.
  void withdraw() noexcept;

 private:
  // Notes what is stale, and returns the markers. Throws `already_exists` unless `overwrite`.
  [[nodiscard]] std::vector<ObjectInfo> look(bool overwrite);

  Store& store_;
  const UploadPlan& plan_;
  std::vector<std::string> stale_;
};

// Removes what a rank has copied before the upload failed.
void withdraw(Store& store, const UploadPlan& plan, int rank) noexcept;

}  // namespace tessera
