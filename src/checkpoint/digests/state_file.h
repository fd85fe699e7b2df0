// The file with digests of a training state, which a save of an OLMo kind puts beside its files. It
// has the save's id, so it tells one save from another in its place.
#pragma once

#include <cstdint>

#include "tessera/storage.h"

namespace tessera {

inline constexpr const char* kStateFile = "tessera-state.json";
inline constexpr std::uint64_t kStateFileLimit = std::uint64_t{1} << 30;  // bytes

// Which save of an OLMo kind the directory holds, by the end of the file; 0: nothing there says so
// (fault-rows C04). It is asked for several times while a checkpoint is opened and loaded, so it
// does not read the digests.
[[nodiscard]] std::uint64_t save_mark_of(const Store& directory);
// Whether the directory says that it holds another save than that of `mark`, which is not 0.
[[nodiscard]] bool holds_other_save(const Store& directory, std::uint64_t mark);

}  // namespace tessera
