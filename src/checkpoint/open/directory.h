// What each file of a checkpoint's directory is to it (docs/guide/what-is-in-a-directory.md).
// Openers decide it; what they have to say stands in Checkpoint::remarks.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

[[nodiscard]] FileRow missing_row(std::string name, std::string reason = "the checkpoint names it");
// Adds the rows, and one warning for all that have a state and a reason in common. Rows without a
// reason get none.
void remark(std::vector<FileRow> rows, Checkpoint& checkpoint);

// Whether a file is missing, be it that no leaf lies in it.
[[nodiscard]] bool lacks_files(const Checkpoint& checkpoint);

// The error with another text, of what one rank alone found.
[[nodiscard]] Error reworded(const Error& error, std::string text);
// The first of several errors, with what the others say.
[[nodiscard]] Error all_of(const std::vector<Error>& faults);
// The error without the ways on that it offers ("; --partial takes what is there") by options that
// the caller does not have. For callers that have none of them `has` is empty.
[[nodiscard]] Error without_offers(const Error& error,
                                   const std::function<bool(const std::string& option)>& has = {});

inline constexpr std::string_view kTrailingBytes = "trailing-bytes";
// Whether the fault is among OpenOptions::accept.
[[nodiscard]] bool accepts(const OpenOptions& options, std::string_view fault);
// Throws `invalid_argument` for a word there that is no fault.
void require_known_faults(const OpenOptions& options);

}  // namespace tessera
#pragma GCC visibility pop
