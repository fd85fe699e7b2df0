// What the Hub's API says, taken out of its answers: JSON, and headers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::hub {

struct HubEntry {
  std::string path;          // from the repository's root
  std::uint64_t size = 0;    // of a file
  std::string content = {};  // the digest that the Hub knows a file by: of LFS, else of git
  bool is_directory = false;
};

// All throw `corrupt` for what is none of the Hub's answers.

// The commit of /api/TYPE/REPO/revision/REVISION, in hexadecimal digits.
[[nodiscard]] std::string commit_in(std::string_view json);
// A page of /api/TYPE/REPO/tree/COMMIT/DIRECTORY. Entries that are neither files nor directories
// (modules of git) are left out. Names are such as stores have: git has no others.
[[nodiscard]] std::vector<HubEntry> entries_in(std::string_view json);
// The query of the next page, which Link headers tell; "": there is none.
[[nodiscard]] std::string next_query(std::string_view link);

}  // namespace tessera::hub
