// Snapshots that writer processes of this host keep in memory, as stores for whoever starts again.
//
// Each process says what it keeps in a small file of a directory that its user alone may open:
// TESSERA_ARENA_DIR, or "/tmp/tessera-arenas-UID". The memory has no name: others open it through
// the process that holds it, as long as that lives. docs/design/arena.md has the reasons.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/host_process.h"
#include "base/process.h"
#include "tessera/storage.h"

namespace tessera {

// Memory that one process keeps as an object of a store.
struct KeptObject {
  std::string name;
  int fd = -1;                          // of that process
  std::uint64_t bytes = 0;              // of the object, from the beginning of the memory
  std::uint64_t device = 0, inode = 0;  // of the memory: numbers of descriptors are used again
};
// With the memory's own facts. Throws `io`.
[[nodiscard]] KeptObject kept_object(std::string name, const Fd& memory, std::uint64_t bytes);

// What one rank's process keeps of one save.
struct KeptPart {
  std::string place;         // where the save goes: a path or URL
  std::string writer;        // who saves, the same on all ranks
  std::uint64_t number = 0;  // of the save, by that writer
  int rank = 0, size = 1;
  std::string trainer;             // as same_host::to_text() has it; empty: not known
  same_host::ProcessId process{};  // that keeps it
  std::vector<KeptObject> objects = {};
};

// Says it, in the place of what that process said before, and takes it back in the end.
class KeptNotice {
 public:
  // Throws `unsafe` for a directory that others may write to, `unsupported` for a place with a line
  // break, and `io`.
  explicit KeptNotice(const KeptPart& part);
  ~KeptNotice();
  KeptNotice(const KeptNotice&) = delete;
  KeptNotice& operator=(const KeptNotice&) = delete;

  // False once somebody has said that it is needed no more.
  [[nodiscard]] bool is_wanted() const;

 private:
  std::string path_;
  MadeHere made_here_;
};

// What processes that live keep for this user, by place and rank. What dead ones left is removed.
// Throws `unsafe` for a directory that others may write to.
[[nodiscard]] std::vector<KeptPart> kept_parts();
// Whether the trainer of that part runs, or may.
[[nodiscard]] bool has_trainer(const KeptPart& part);
// Tells the processes that keep these that they are needed no more.
void forget(const std::vector<KeptPart>& parts);

// The newest of the snapshots of that place of which all ranks' parts are here, as a store in which
// nobody writes. Throws `not_found` if nothing is kept for the place, and `incomplete` if parts of
// ranks are not here.
[[nodiscard]] std::shared_ptr<Store> arena_store(const std::string& place);

}  // namespace tessera
