// What the pickles of a file or checkpoint would import and call in Python, without building or
// running anything.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] tessera {

enum class NameKind : std::uint8_t {
  vetted,     // was looked at: used like this it does nothing but build data
  allowed,    // by ScanOptions::allow
  unknown,    // nobody has looked at it, or at this use of it: it may run code
  dangerous,  // runs code, opens files or reaches the system
};
[[nodiscard]] std::string_view to_string(NameKind kind) noexcept;

struct ScannedName {
  std::string name;  // "module.name", as Python 3 has it
  NameKind kind = NameKind::unknown;
  std::uint64_t pickles = 0;  // that mention it
  std::string first;  // the first of them (of this kind): a file, and the record or item in it
  std::string how;    // why a name that is vetted otherwise is not here: how it is used
};

struct ScanReport {
  std::vector<ScannedName> names;  // the most dangerous ones first, then by name
  std::uint64_t pickles = 0;
  // What could not be scanned to its end, and what Python may read and Tessera does not: damage,
  // archives of other kinds, compressed files, directories that are links or may not be read.
  std::vector<std::string> problems;

  // Nothing unknown, nothing dangerous, and no problem.
  [[nodiscard]] bool clean() const;
};

struct ScanOptions {
  // Names ("module.name") or globs of a project's own classes, which count as `allowed` and not as
  // `unknown`. Dangerous names stay what they are.
  std::vector<std::string> allow;
  std::stop_token stop;
};

// Every pickle of a file (an archive of torch.save, its stream before 1.6, bare pickles one after
// another, numpy's arrays of objects; those in any of these, and those that calls such as
// `pickle.loads` get) or of a directory: its `.metadata` (or those of the ranks) and each item that
// they name, and every other file that begins as a pickle, an archive or text that Python could
// unpickle; in a safetensors file the archives of its entry tessera.tree. What opens files is what
// reads here. Throws `not_found`, and `cancelled` when `options.stop` is requested. What is
// promised and what is not: SECURITY.md.
[[nodiscard]] ScanReport scan(const std::string& path, const ScanOptions& options = {});

}  // namespace tessera
