// Copies of what ranks of other hosts keep in memory: their hosts may be lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/message.h"
#include "tessera/comm.h"

namespace tessera {

// Where others read what a process keeps (storage/arena/peer.h), and what it listens on, for
// people.
struct PeerPlace {
  std::string address, interface;
};
auto fields(FieldsOf<PeerPlace> auto& place) {
  return std::tie(place.address, place.interface);
}

// What every rank says of itself before partners are chosen.
struct PartnerRank {
  std::string host;     // ranks of one see the same snapshots in memory
  std::string machine;  // hosts of one may end together; empty: not known
  std::string name;     // of the host, for people
  PeerPlace place;
};
auto fields(FieldsOf<PartnerRank> auto& rank) {
  return std::tie(rank.host, rank.machine, rank.name, rank.place);
}
// Of this process.
[[nodiscard]] PartnerRank own_partner_rank(PeerPlace place);

// For each rank the one that has a copy of its snapshots: of the next host, in the order of their
// lowest ranks, one after another. -1: there is one host.
[[nodiscard]] std::vector<int> partners_of(const std::vector<PartnerRank>& ranks);
// Which hosts and their partners may end together; empty: none that is known.
[[nodiscard]] std::string risk_text(const std::vector<PartnerRank>& ranks,
                                    const std::vector<int>& partners);

// A rank whose snapshots a process copies.
struct PartnerPlace {
  std::int32_t rank = 0;
  std::string host, address;
};
auto fields(FieldsOf<PartnerPlace> auto& place) {
  return std::tie(place.rank, place.host, place.address);
}

// Those that this rank's process is to copy; `own` tells of this rank's. The log of rank 0 says who
// copies from whom. Collective.
[[nodiscard]] std::vector<PartnerPlace> choose_partners(Group& group,
                                                        const std::function<PeerPlace()>& own);

// Copies in threads of its own while it lives, and says in notices of this process what it has.
// What fails, and how fast it was, is in the log. The last copy of a rank that is lost stays.
class PartnerCopies {
 public:
  // `trainer`: whose death ends it, as same_host::to_text() has it.
  PartnerCopies(const std::vector<PartnerPlace>& owners, const std::string& trainer,
                std::chrono::milliseconds silence);

  // The trainer of this process has ended, or is one no more.
  void note_end_of_trainer();

 private:
  class Copier;
  std::vector<std::shared_ptr<Copier>> copiers_;
  std::vector<std::jthread> threads_;
};

}  // namespace tessera
