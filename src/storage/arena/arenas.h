// Snapshots that writer processes of this host keep in memory, as stores for whoever starts again
// or reads beside a training.
//
// Each process says what it keeps in a small file of a directory that its user alone may open:
// TESSERA_ARENA_DIR, or "/tmp/tessera-arenas-UID". The memory has no name: others open it through
// the process that holds it, as long as that lives. docs/design/arena.md has the reasons.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/host_process.h"
#include "base/process.h"
#include "tessera/storage.h"

namespace tessera {

// Memory that one snapshot after another is written to: behind its bytes is a count, which whoever
// writes raises before. A reader has a shared lock (flock) on the memory, and what it has seen the
// count to be stays so while it has that.
inline constexpr std::uint64_t kCountBytes = 4096;             // that it has for itself, at the end
[[nodiscard]] std::uint64_t count_place(std::uint64_t bytes);  // where in the memory it is
// Raises the count of memory for so many bytes. False: somebody reads. Throws `io`.
[[nodiscard]] bool begin_overwriting(const Fd& memory, std::uint64_t bytes);
// The count. Throws `io`.
[[nodiscard]] std::uint64_t overwrites_of(const Fd& memory, std::uint64_t bytes);

inline constexpr const char* kEnded = "ended";  // in place of a trainer that is one no more

// Memory that one process keeps as an object of a store.
struct KeptObject {
  std::string name;
  int fd = -1;                          // of that process
  std::uint64_t bytes = 0;              // of the object, from the beginning of the memory
  std::uint64_t device = 0, inode = 0;  // of the memory: numbers of descriptors are used again
  std::uint64_t count_at = 0;           // where in the memory its count is; 0: it has none
  std::uint64_t overwrites = 0;         // the count while the object is there
};
// With the memory's own facts. Throws `io`.
[[nodiscard]] KeptObject kept_object(std::string name, const Fd& memory, std::uint64_t bytes);
// Opens it for reading, with a shared lock if it has a count. None: it is not there any more.
[[nodiscard]] std::optional<Fd> open_kept(const same_host::ProcessId& process,
                                          const KeptObject& object);

// What a process keeps of one rank's share of one save.
struct KeptPart {
  std::string place;         // where the save goes: kept_place() of a path or URL
  std::string writer;        // who saves, the same on all ranks
  std::uint64_t number = 0;  // of the save, by that writer
  int rank = 0, size = 1;
  std::uint64_t made = 0;                // when, in nanoseconds since the host started
  std::string run_mark;                  // run_mark() of the place then
  bool is_step = false;                  // its kind is one that runs go on from
  bool is_readers = false;               // a reader holds it, for others that load the same save
  std::uint64_t stored = 0;              // the digest of its marker, of rank 0; 0: not stored yet
  std::string trainer;                   // as same_host::to_text() has it; empty: not known; kEnded
  std::string peer;                      // where other hosts read it (peer.h); empty: nowhere
  same_host::ProcessId process{};        // that keeps it
  std::uint64_t notice = 0;              // of those of that process
  std::vector<KeptObject> objects = {};  // none: the next snapshot is being written over it
};

// As a notice has it.
[[nodiscard]] std::string notice_text(const KeptPart& part);
// None: no such text.
[[nodiscard]] std::optional<KeptPart> part_from_notice(const std::string& text);
// Where notices are: TESSERA_ARENA_DIR, or "/tmp/tessera-arenas-UID".
[[nodiscard]] std::string notice_directory();
// The same on processes that see the same notices.
[[nodiscard]] std::string notice_host();
// The objects of one rank. The digests are that of the tree, and those of the arena's blocks
// (io/checked_source.h), 8 bytes each.
struct ArenaNames {
  std::string tree, arena, digests;
};
[[nodiscard]] ArenaNames arena_names(int rank);
// A path or URL as parts have it: absolute, links followed, without a slash at its end.
[[nodiscard]] std::string kept_place(const std::string& place);

// Says it, and takes it back in the end.
class KeptNotice {
 public:
  // Of this process. Throws `unsafe` for a directory that others may write to, `unsupported` for a
  // place with a line break, and `io`.
  explicit KeptNotice(KeptPart part);
  ~KeptNotice();
  KeptNotice(const KeptNotice&) = delete;
  KeptNotice& operator=(const KeptNotice&) = delete;

  [[nodiscard]] const KeptPart& part() const noexcept { return part_; }
  // False once somebody has said that it is needed no more.
  [[nodiscard]] bool is_wanted() const;
  // Says this in its place. Who lists the directory meanwhile sees one of the two. Throws as the
  // constructor does.
  void renew(KeptPart part);
  // Says from now on that the next snapshot is being written over it, that it is stored, or that
  // nobody trains any more. Each throws `io`.
  void let_go();
  void note_stored(std::uint64_t marker);
  void note_end_of_trainer();

 private:
  void write();

  KeptPart part_;
  std::string path_;
  MadeHere made_here_;
};

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
// What processes that live keep for this user, by place, save and rank. What dead ones left is
// removed. Throws `unsafe` for a directory that others may write to.
[[nodiscard]] std::vector<KeptPart> kept_parts();
// Whether the trainer of that part runs, or may.
[[nodiscard]] bool has_trainer(const KeptPart& part);
// The place and the save of a part, as arena_store() takes it: what is kept for that place later is
// another one.
[[nodiscard]] std::string save_place(const KeptPart& part);
[[nodiscard]] std::string save_name(const KeptPart& part);  // without the place
// Which directory a place is in: one that was removed and made again has another mark. Empty: it is
// on no disk, or not there.
[[nodiscard]] std::string run_mark(const std::string& place);
// Nanoseconds since the host started.
[[nodiscard]] std::uint64_t host_time();
#pragma GCC visibility pop
// Tells the processes that keep these that they are needed no more.
void forget(const std::vector<KeptPart>& parts);
// Whether a path is a URL of `arena`.
[[nodiscard]] bool is_arena(std::string_view path);
// Whether the place is `above`, or in it.
[[nodiscard]] bool is_kept_in(const std::string& place, const std::string& above);

// The newest of the snapshots of which all ranks' parts are here, as a store in which nobody
// writes, and which stays what it is while the training goes on. `place`: that of a save, or a run
// in which the saves are, or a save_place(). The
// store's name is "arena://" and that. While a training is between
// two snapshots, waits for the next. Throws `not_found` if nothing is kept for the place, and
// `incomplete` if parts of ranks are not here.
[[nodiscard]] std::shared_ptr<Store> arena_store(const std::string& place);

// From now on arena_store() on this host has that part of another host from there, until this
// process ends or somebody forgets it. Throws what KeptNotice throws.
void note_remote(const KeptPart& part);
[[nodiscard]] bool is_remote(const KeptPart& part) noexcept;

// Compares the tree of a part of this host with its digest, and with `threads` that are not 0 all
// of its tensors, too. Throws `corrupt`, `not_found` for one that is not there any more or is being
// written over, and `cancelled`.
void require_intact(const KeptPart& part, int threads, const std::stop_token& stop);

}  // namespace tessera
