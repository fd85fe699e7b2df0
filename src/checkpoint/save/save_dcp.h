// Saving a DCP checkpoint by N ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/checkpoint.h"

namespace tessera {

// The steps of one save, to be called once each and in this order by all ranks: save() of
// tessera/checkpoint.h. What one throws it throws on all ranks, and ends the save.
class GroupSave {
 public:
  virtual ~GroupSave() = default;
  GroupSave() = default;
  GroupSave(const GroupSave&) = delete;
  GroupSave& operator=(const GroupSave&) = delete;

  // On rank 0 alone, when all ranks can begin. All ranks are told what this returns.
  virtual Bytes prepare() { return {}; }
  virtual void plan(const Bytes& prepared) = 0;  // writes no data
  virtual std::uint64_t write() = 0;             // this rank's data; returns bytes of tensors
  virtual SaveResult commit() = 0;
};

// Flattens `tree`, with what that throws. The checkpoint comes into the root of `store`. `group`
// and `options` outlive the result. Its prepare() refuses or cleans up, and puts a probe into the
// store, which plan() takes away.
[[nodiscard]] std::unique_ptr<GroupSave> dcp_save(const Value& tree, std::shared_ptr<Store> store,
                                                  Group& group, const SaveOptions& options);

}  // namespace tessera
