// The names of the kinds of checkpoints, as users write them: "dcp", "torch", "olmo-full".
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

// The inverse of to_string(CheckpointKind). Throws `invalid_argument` with the names that there
// are.
[[nodiscard]] CheckpointKind kind_named(std::string_view name);
// The kind of a file, by its name's extension; none: the name is of no file.
[[nodiscard]] std::optional<CheckpointKind> kind_of_file_name(const std::filesystem::path& path);
// The kind of file that a target's name asks for; none, too, where a directory has that name.
[[nodiscard]] std::optional<CheckpointKind> kind_of_target(const Location& target);

}  // namespace tessera
