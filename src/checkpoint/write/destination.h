// The place that a conversion writes to, and how what it writes becomes visible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/convert.h"
#include "tessera/storage.h"

namespace tessera {

// How a target comes to its name.
enum class Publishing : std::uint8_t {
  file,       // renamed
  marker,     // files of a directory are renamed, `.metadata` last
  directory,  // renamed whole
};

// What a conversion writes, and where.
struct Destination {
  std::string directory;
  std::string file;  // empty for kinds that are directories
  Publishing publishing = Publishing::file;
  std::shared_ptr<Store> store = nullptr;  // where it goes; null: the directory
};

// Whether the target is a set of safetensors.
[[nodiscard]] bool is_set(const ConvertOptions& options);
// What the target is called in a directory, if it is one file; empty: it is a directory.
[[nodiscard]] std::string_view single_file(const ConvertOptions& options);
// The destination that `target` and the options name. Throws `invalid_argument` where they
// contradict each other and `unsupported` for what cannot be written there.
[[nodiscard]] Destination destination_of(const Location& target, const ConvertOptions& options);
// Only a checkpoint is replaced by a directory: throws `already_exists` for a directory at `path`
// that holds something else.
void require_checkpoint(const std::string& path);
// What the caller is told that was written: the file, or the directory of a kind that is one.
[[nodiscard]] std::string written_path(const Destination& destination);

}  // namespace tessera
