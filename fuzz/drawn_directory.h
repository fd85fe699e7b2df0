// Directories as nobody should make them: names that openers look for, with contents that belong
// elsewhere, numbers out of range, links, pipes and directories in the places of files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera::fuzz {

using FileBytes = std::shared_ptr<const std::vector<std::byte>>;
using Files = std::map<std::string, FileBytes>;  // name, with '/' -> content

enum class EntryKind { file, link, pipe, directory };
struct Entry {
  EntryKind kind = EntryKind::file;
  FileBytes content = {};   // of a file
  std::string target = {};  // of a link
};
using Entries = std::map<std::string, Entry>;  // by name, none below one that is no directory

// Checkpoints of all kinds, from which contents are taken: the goldens below `golden`, and what we
// write ourselves in a new directory below `scratch`.
[[nodiscard]] std::vector<Files> checkpoints_of_all_kinds(const std::string& golden,
                                                          const std::string& scratch);

// What only the bytes of `input` determine: most often a checkpoint with a few changes.
[[nodiscard]] Entries drawn_directory(ByteView input, const std::vector<Files>& checkpoints);

// Makes the entries below `directory`, which is empty.
void write_entries(const std::string& directory, const Entries& entries);
// The files alone.
[[nodiscard]] std::shared_ptr<Store> in_memory(const Entries& entries);

}  // namespace tessera::fuzz
