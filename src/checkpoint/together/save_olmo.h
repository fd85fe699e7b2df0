// Saving one of OLMo's kinds by N ranks (docs/design/checkpointers.md).
#pragma once

#include <memory>

#include "checkpoint/save/save_dcp.h"
#include "tessera/checkpoint.h"

namespace tessera {

// Not collective; throws for what this rank cannot save. `group` and `options` outlive the result.
// Its plan() makes the directory's sibling; until it is committed the directory that was there
// stays.
[[nodiscard]] std::unique_ptr<GroupSave> olmo_kind_save(const Value& tree, const Location& where,
                                                        CheckpointKind kind,
                                                        const SaveOptions& options, Group& group);

}  // namespace tessera
