// A directory on a disk of this machine, for what a store takes only whole.
#pragma once

#include <string>

#include "base/fork.h"
#include "storage/posix/lock.h"
#include "tessera/comm.h"

namespace tessera {

// TMPDIR/tessera-staged-<attempt>, or below /tmp: the same on all ranks, whose hosts may each have
// one of their own. The last rank of a host that lets go of it removes it, and the next staging
// there what killed ranks have left.
class Staging {
 public:
  // Rank 0's TMPDIR counts. Collective.
  explicit Staging(Group& group);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  // Where the checkpoint comes to be that goes to a place of this name.
  [[nodiscard]] std::string place_for(const std::string& target) const;

 private:
  std::string path_;
  LockedFd lock_;
  MadeHere made_here_;
};

}  // namespace tessera
