// The side file: what Tessera knows of a checkpoint and the checkpoint's own format cannot say
// (docs/formats/side-file.md).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checked_source.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera {

struct FileDigests {
  std::uint64_t size = 0;    // bytes
  Digests blocks;            // of `size` bytes, or of those behind `origin`
  std::uint64_t origin = 0;  // where block 0 begins; always 0 in a side file
  // The digest of the file's tail, which has those of its blocks: then `blocks` is empty.
  std::optional<std::uint64_t> tail = {};
  [[nodiscard]] bool operator==(const FileDigests&) const = default;
};
// Our name in the files that we write.
[[nodiscard]] std::string own_producer();

using DigestsByName = std::map<std::string, FileDigests>;  // object name -> digests

struct SideFile {
  std::string save_id;   // the save it belongs to; empty where saves have no id
  std::string producer;  // who computed the digests
  DigestsByName files;
  std::string types = {};  // of the tree, as encode_types has it; empty: nothing is said
};

// Beside a `.metadata` whose save has this id.
[[nodiscard]] std::string side_file_name(const std::string& save_id);
[[nodiscard]] bool is_side_file_name(std::string_view name);  // of any save
// In a directory without `.metadata`, and beside a single file.
inline constexpr std::string_view kDirectorySideFile = "tessera-digests.json";
inline constexpr std::string_view kSideFileSuffix = ".tessera.json";

// Throws `unsupported` for a file whose name is not UTF-8: JSON has no other names.
void require_side_file_can_name(const std::string& file);
[[nodiscard]] std::string encode_side_file(const SideFile& side_file);  // throws the same
// Throws `corrupt` for anything that encode_side_file did not write, a changed byte included, and
// `unsupported` for a later version.
[[nodiscard]] SideFile decode_side_file(std::string_view text);

// `text` with the digest of itself in the place of the 16 digits at `at`, which count as zeros.
void stamp_checksum(std::string& text, std::size_t at);
// Whether those digits are the digest.
[[nodiscard]] bool has_checksum(std::string_view text, std::size_t at);

// Digests as 16 hex digits each, in one string, and back; `corrupt` for anything else.
[[nodiscard]] std::string digests_text(const Digests& digests);
[[nodiscard]] Digests digests_of_text(std::string_view text);

// The file with digests of a training state, which a save of an OLMo kind puts beside its files. It
// has the save's id, so it tells one save from another in its place.

inline constexpr const char* kStateFile = "tessera-state.json";
inline constexpr std::uint64_t kStateFileLimit = std::uint64_t{1} << 30;  // bytes

// The mark of the save of an OLMo kind that the directory holds, by the end of the file; 0: nothing
// there says so (fault-rows C04). It is asked for several times while a checkpoint is opened and
// loaded, so it does not read the digests.
[[nodiscard]] std::uint64_t save_mark_of(const Store& directory);
// Whether the directory says that it holds another save than that of `mark`, which is not 0.
[[nodiscard]] bool holds_other_save(const Store& directory, std::uint64_t mark);

}  // namespace tessera
