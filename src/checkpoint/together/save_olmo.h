// Saving one of OLMo's kinds by N ranks (docs/design/checkpointers.md).
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/checkpoint.h"

namespace tessera {

// The steps of one save, to be called once each and in this order by all ranks. What one throws it
// throws on all ranks, and ends the save; the directory that was there stays.
class OlmoKindSave {
 public:
  virtual ~OlmoKindSave() = default;
  OlmoKindSave() = default;
  OlmoKindSave(const OlmoKindSave&) = delete;
  OlmoKindSave& operator=(const OlmoKindSave&) = delete;

  virtual void plan() = 0;            // makes the directory's sibling
  virtual std::uint64_t write() = 0;  // returns bytes of tensors that this rank wrote
  virtual SaveResult commit() = 0;
};

// Not collective; throws for what this rank cannot save. `group` and `options` outlive the result.
[[nodiscard]] std::unique_ptr<OlmoKindSave> olmo_kind_save(const Value& tree, const Location& where,
                                                           CheckpointKind kind,
                                                           const SaveOptions& options,
                                                           Group& group);

}  // namespace tessera
