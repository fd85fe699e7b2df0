// The one exception type of Tessera: every failure that a file, a peer, a store or a caller can
// cause, with one of a closed set of codes and what a handler needs: operation, path, key, byte
// offset and cause. A library function never prints, exits or aborts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] tessera {

enum class ErrorCode : std::uint8_t {
  invalid_argument,  // the caller asked for something that makes no sense
  not_found,         // a path, key or tensor is not there; see Error::is_no_checkpoint()
  already_exists,    // the target exists, and the caller did not ask to replace it
  corrupt,           // bytes contradict the format, their checksum or each other
  incomplete,        // a part of a whole is missing: a truncated file, a hole in a tensor
  unsupported,       // well formed, but this version does not handle the variant
  unsafe,            // would execute code or leave the checkpoint's directory
  limit,             // a size or count exceeds a stated cap
  conflict,          // two writers, or two pieces that disagree
  io,                // the operating system or the store refused
  out_of_space,      // device, quota or the limit of a file's size (ulimit -f) leave no room
  timeout,           // a deadline passed
  peer_failed,       // other ranks failed; see Error::peers()
  mismatch,          // shapes, dtypes, names or world sizes differ that should agree
  cancelled,         // the caller asked for the work to end before it was done
};

// The code's name as written above.
[[nodiscard]] std::string_view to_string(ErrorCode code) noexcept;

class Error : public std::exception {
 public:
  // `what_failed` says what was found and what was expected, in one sentence without a final dot.
  Error(ErrorCode code, std::string what_failed);

  // Each returns *this, so that a throw site reads `throw Error(...).at_path(p).at_offset(o)`. A
  // path or offset that is already set stays, because the innermost frame knows it best.
  Error& at_path(std::string path);           // file, object, store URL
  Error& at_key(std::string key);             // tensor or state-dict key
  Error& at_offset(std::uint64_t offset);     // byte offset inside the path
  Error& while_doing(std::string operation);  // "loading a checkpoint", outermost last
  Error& as_no_checkpoint();                  // is_no_checkpoint() from now on

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& key() const noexcept { return key_; }
  [[nodiscard]] std::optional<std::uint64_t> offset() const noexcept { return offset_; }
  // Whether nothing of a checkpoint is at the place that was opened, so that a program may begin
  // afresh: `not_found` is also the code of a layer or an optimizer that a checkpoint lacks.
  [[nodiscard]] bool is_no_checkpoint() const noexcept { return is_no_checkpoint_; }

  // The errors by rank, when several ranks raised the error together. Empty when the error is
  // local.
  [[nodiscard]] const std::map<int, Error>& peers() const noexcept;
  // Combines the failures of `ranks` ranks into one error. In a group of one rank it is that rank's
  // own error. Otherwise it has the code, path, key and offset that all failures share, and
  // `peer_failed` where codes differ. It is_no_checkpoint() on every rank if all failures are,
  // rank 0's among them. `unnamed`: how many ranks failed that are not in `failures`.
  static Error from_peers(std::map<int, Error> failures, int ranks, std::size_t unnamed = 0);

  // One line: `code: what failed [path, key, offset] (operation)`. If several ranks failed, the
  // text of their failures gives the places instead of the brackets.
  [[nodiscard]] const char* what() const noexcept override { return line_.c_str(); }

 private:
  void render();
  [[nodiscard]] std::string where() const;  // "path, key 'k', offset 3"; empty: unknown

  ErrorCode code_;
  std::string message_;                  // what was found, what was expected
  std::string path_;                     // empty: unknown
  std::string key_;                      // empty: none
  std::string operation_;                // empty: unknown
  std::optional<std::uint64_t> offset_;  // none: not about a byte
  bool is_no_checkpoint_ = false;
  std::shared_ptr<const std::map<int, Error>> peers_;  // null: local failure
  std::string told_;                                   // the part of where() that is in the message
  std::string line_;                                   // what() points here
};

}  // namespace tessera
