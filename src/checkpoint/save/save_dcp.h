// Saving a DCP checkpoint by N ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/checkpoint.h"

namespace tessera {

// The steps of one save, to be called once each and in this order by all ranks: save() of
// tessera/checkpoint.h. What one throws it throws on all ranks, and ends the save.
class DcpSave {
 public:
  virtual ~DcpSave() = default;
  DcpSave() = default;
  DcpSave(const DcpSave&) = delete;
  DcpSave& operator=(const DcpSave&) = delete;

  // On rank 0 alone, when all ranks can begin: refuses or cleans up, and puts a probe into the
  // store. All ranks are told what this returns.
  virtual Bytes prepare() = 0;
  virtual void plan(const Bytes& prepared) = 0;  // writes nothing else; the probe goes
  virtual std::uint64_t write() = 0;             // this rank's data files; returns bytes of tensors
  virtual SaveResult commit() = 0;
};

// Flattens `tree`, with what that throws. The checkpoint comes into the root of `store`. `group`
// and `options` outlive the result.
[[nodiscard]] std::unique_ptr<DcpSave> dcp_save(const Value& tree, std::shared_ptr<Store> store,
                                                Group& group, const SaveOptions& options);

}  // namespace tessera
