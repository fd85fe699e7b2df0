#include "checkpoint/load/scattered.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/host.h"
#include "base/named.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "tessera/error.h"
#include "tessera/restore.h"

namespace tessera {
namespace {

using Ranks = std::vector<int>;  // whose files a directory has, in ascending order

// On each disk, as one rank sees it.
struct Seer {
  int rank = 0;
  std::string host;
};
using Disks = std::map<Ranks, Seer>;

Bytes encode(const Disks& disks) {
  MessageWriter message;
  for (const auto& [ranks, seer] : disks) {
    message.count(static_cast<std::uint64_t>(seer.rank)).text(seer.host).count(ranks.size());
    for (const int rank : ranks) message.count(static_cast<std::uint64_t>(rank));
  }
  return message.take();
}

Disks decode(const Bytes& bytes) {
  Disks disks;
  for (MessageReader message(bytes); !message.at_end();) {
    Seer seer;
    seer.rank = static_cast<int>(message.count());
    seer.host = message.text();
    Ranks ranks(message.count());
    for (int& rank : ranks) rank = static_cast<int>(message.count());
    disks.emplace(std::move(ranks), std::move(seer));
  }
  return disks;
}

// Of ranks that see the same, the lowest stays.
Bytes join(const Bytes& left, const Bytes& right) {
  Disks all = decode(left);
  all.merge(decode(right));
  return encode(all);
}

Ranks ranks_in(const Store& store, CheckpointKind kind) {
  const std::string folder = kind == CheckpointKind::olmo_local ? "model" : "";
  Ranks ranks;
  for (const ObjectInfo& file : deciding_files(store)) {
    if (const auto rank = rank_of_own(file.name, folder)) ranks.push_back(*rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

// What this rank sees; nothing, if it cannot say.
Disks own_disk(const Location& where, const Group& group) {
  try {
    const auto kind = olmo_kind_at(where);
    if (kind != CheckpointKind::olmo_local && kind != CheckpointKind::olmo_legacy) return {};
    return {{ranks_in(*place_of(where).store, *kind), {group.rank(), host_name()}}};
  } catch (const Error&) {
    return {};
  }
}

// "0 to 3, 8"
std::string text_of(const Ranks& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += " to " + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string advice(const Disks& disks) {
  Named named;
  for (const auto& [ranks, seer] : disks)
    named.add(rank_on_host(seer.rank, seer.host) + " has those of ranks " + text_of(ranks));
  return "; the files lie on several disks: " + named.text() +
         ". Ranks that saved them restore from these in the layout that they had; for other ranks "
         "and layouts copy all files into one directory that every rank sees";
}

}  // namespace

void rethrow_with_disks(const Error& error, const Location& where, Group& group) {
  // Without peers this rank alone has it: the group is broken, or is this rank.
  if (error.code() != ErrorCode::incomplete || error.peers().empty()) throw error;
  const auto conclude = [&](const Bytes& all) -> Bytes {
    const Disks disks = decode(all);
    const Error& first = error.peers().begin()->second;
    Error told(first.code(), first.message() + (disks.size() > 1 ? advice(disks) : ""));
    throw told.at_path(first.path());
  };
  confer(group, "opening a checkpoint",
         {[&] { return encode(own_disk(where, group)); }, join, conclude});
  throw error;
}

}  // namespace tessera
