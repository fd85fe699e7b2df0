// The files of an open checkpoint, as what is read of them is checked.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/verify.h"

namespace tessera {

using SourceByName = std::map<std::string, std::shared_ptr<const ByteSource>>;

// Every file with the digests that there are for it; by the source's name.
[[nodiscard]] SourceByName sources_of(const Checkpoint& checkpoint);

// The digests of a training state that a save left in the checkpoint, beside its tensors.

// A tensor of the model or the optimizer, as it is stored, and its digest.
struct DigestedTensor {
  Leaf leaf;
  std::uint32_t digest = 0;
};

struct SavedState {
  std::vector<DigestedTensor> tensors;
  std::vector<Finding> findings;  // tensors that only one side has
};
// The saved state of a directory of an OLMo kind; empty: no save has left digests there. Throws
// `corrupt` for a file of digests that is damaged.
[[nodiscard]] SavedState saved_state_of(const Checkpoint& checkpoint);

// Reads all of the tensor. Throws `mismatch` if its bytes have another digest. Returns their
// number.
std::uint64_t require_digest(const DigestedTensor& tensor, const std::stop_token& stop);

}  // namespace tessera
