// What a writer process keeps of a save for who starts again on this host.
#pragma once

#include <memory>

#include "base/process.h"
#include "checkpoint/background/process.h"
#include "storage/arena/arenas.h"
#include "tessera/io.h"

namespace tessera {

// Snapshots of the same run that other writers have left are needed no more when one has staged.
void forget_older(const WriterJob& job);

// Others of the user find it while it lives (storage/arena/arenas.h). The arena stays as it is.
class KeptSnapshot {
 public:
  // Computes the digests of `arena`, which is `memory`. Throws what KeptNotice throws.
  KeptSnapshot(const WriterJob& job, const WriterHello& hello, ByteView arena, const Fd& memory);
  [[nodiscard]] bool is_wanted() const { return notice_->is_wanted(); }

 private:
  Fd tree_, digests_;
  std::unique_ptr<KeptNotice> notice_;
};

}  // namespace tessera
