// What the pickles of a file or checkpoint mention, without building or running anything.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] tessera {

enum class NameKind : std::uint8_t {
  known,      // has a meaning here: becomes a value
  opaque,     // kept as an object node, never used
  dangerous,  // in Python it could run code, open files or reach the system
};
[[nodiscard]] std::string_view to_string(NameKind kind) noexcept;

struct ScannedName {
  std::string name;  // "module.name", as the file has it
  NameKind kind = NameKind::opaque;
  std::uint64_t pickles = 0;  // that mention it
  std::string first;          // the first of them: a file, and the record or item in it
};

struct ScanReport {
  std::vector<ScannedName> names;  // dangerous ones first, then by name
  std::uint64_t pickles = 0;
  std::vector<std::string> problems;  // what could not be scanned to its end
};

// Every pickle of a file (a torch.save archive, a bare pickle, torch's stream before 1.6) or of a
// directory: its `.metadata` (or those of the ranks) and each item that they name, and every file
// with a suffix of a pickle; in a safetensors file the archives of its entry tessera.tree. Damage
// is a problem in the report, not an exception: what comes before it is still listed. Throws
// `not_found`, and `cancelled` when `stop` is requested.
[[nodiscard]] ScanReport scan(const std::string& path, const std::stop_token& stop = {});

}  // namespace tessera
