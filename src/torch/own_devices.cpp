#include "torch/own_devices.h"

#include <map>
#include <sstream>
#include <utility>

#include "base/host.h"
#include "comm/same_host/process.h"
#include "comm/text.h"
#include "tessera/error.h"
#include "torch/backends.h"

namespace tessera {
namespace {

// A field a line.
Bytes encode(const RankDevice& one) {
  return to_bytes(one.name + '\n' + one.host + '\n' + one.machine + '\n' + one.physical);
}

RankDevice decode(const Bytes& bytes) {
  std::istringstream text(to_text(bytes));
  RankDevice one;
  for (auto* field : {&one.name, &one.host, &one.machine, &one.physical})
    std::getline(text, *field);
  return one;
}

// "0 and 2", "0, 1 and 2".
std::string listed(const std::vector<std::size_t>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

std::vector<RankDevice> everyones_device(Group& group, torch::Device mine) {
  // Without a boot id the host's name has to do.
  const auto host = host_name(), boot = same_host::boot_id();
  const auto all =
      group.all_gather(encode({mine.str(), host, boot.empty() ? host : boot, physical_name(mine)}));
  std::vector<RankDevice> by_rank;
  by_rank.reserve(all.size());
  for (const auto& one : all) by_rank.push_back(decode(one));
  return by_rank;
}

void require_own_devices(const std::vector<RankDevice>& by_rank) {
  std::map<std::pair<std::string, std::string>, std::vector<std::size_t>> ranks;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
    ranks[{by_rank[rank].machine, by_rank[rank].physical}].push_back(rank);
  for (const auto& one : by_rank) {
    const auto& sharing = ranks.at({one.machine, one.physical});
    if (sharing.size() == 1) continue;
    throw Error(ErrorCode::invalid_argument,
                "ranks " + listed(sharing) + " share a device, " + one.name + " of host " +
                    one.host +
                    ": each rank needs one of its own (LOCAL_RANK or MeshOptions::device choose "
                    "it; start no more ranks on a host than it has devices), unless "
                    "TESSERA_CUDA_BACKEND=gloo is set on all ranks, which is slow");
  }
}

}  // namespace tessera
