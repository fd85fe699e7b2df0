// A device that several ranks share: NCCL's collectives end there with words of its own, at the
// first of them, or wait for ever.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "tessera/comm.h"

namespace tessera {

// The device of a rank.
struct RankDevice {
  std::string name;      // as the rank calls it
  std::string host;      // for people
  std::string machine;   // the kernel's boot id: containers of one machine have the same
  std::string physical;  // which device of the machine it is
};

// By rank. Collective.
[[nodiscard]] std::vector<RankDevice> everyones_device(Group& group, torch::Device mine);

// Throws `invalid_argument` that names the ranks which share a device, the first one of those.
void require_own_devices(const std::vector<RankDevice>& by_rank);

}  // namespace tessera
