// What OLMo calls its checkpointers, and which files are theirs (checkpoint-rows O-80).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/checkpointer.h"

namespace tessera::detail {

struct KindNames {
  std::string_view name;
  CheckpointKind files;
};
[[nodiscard]] const KindNames& names_of(CheckpointerKind kind) noexcept;

// `named`: what a config.yaml says. Throws `invalid_argument` if that is another sharded one.
// `full` is beside the sharded ones, so its config names any of them.
void require_named(CheckpointerKind kind, const std::optional<std::string>& named);

}  // namespace tessera::detail
