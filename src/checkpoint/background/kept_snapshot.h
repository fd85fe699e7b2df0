// What a writer process keeps of a save for others of this host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/process.h"
#include "checkpoint/background/process.h"
#include "storage/arena/arenas.h"
#include "tessera/io.h"

namespace tessera {

// Once a save to that place is complete, nobody goes on from snapshots that writers of dead
// trainers have of it, or of other steps of the same run.
void forget_older(const WriterJob& job);

struct KeptMemory {
  ByteView arena;
  std::shared_ptr<const Fd> fd;  // null: there are no tensors, and no arena was made
  std::string peer;              // where other hosts will read it (KeptPart::peer)
};

// Others of the user find it while it lives (storage/arena/arenas.h). The arena stays as it is. One
// thread at a time calls it.
class KeptSnapshot {
 public:
  // Computes digests. Throws `cancelled` (HeedStop), what KeptNotice throws, and `conflict` if the
  // trainer has begun to write over it meanwhile.
  // `earlier`: what this process kept before; null: nothing. It says this in that place.
  KeptSnapshot(const WriterJob& job, const WriterHello& hello, KeptMemory memory,
               const std::shared_ptr<KeptNotice>& earlier);
  [[nodiscard]] const std::shared_ptr<KeptNotice>& notice() const noexcept { return notice_; }

  [[nodiscard]] const KeptPart& part() const noexcept { return notice_->part(); }
  // Whether it is there, and nobody has said that it is needed no more.
  [[nodiscard]] bool is_wanted() const { return !is_let_go_ && notice_->is_wanted(); }
  // Whether nobody has begun to write over it.
  [[nodiscard]] bool is_there() const;
  // The save is complete; rank 0 knows the digest of its marker.
  void note_stored(std::uint64_t marker) { notice_->note_stored(marker); }
  // Whoever starts again may go on from it, though the trainer's process may have become another
  // program.
  void note_end_of_trainer() { notice_->note_end_of_trainer(); }
  // The next snapshot is being written over it: whoever looks for one waits for that.
  void let_go();

 private:
  KeptMemory memory_;
  std::uint64_t overwrites_ = 0;  // of the memory while the snapshot is there
  Fd tree_, digests_;
  bool is_let_go_ = false;
  std::shared_ptr<KeptNotice> notice_;
};

}  // namespace tessera
