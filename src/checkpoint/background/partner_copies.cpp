#include "checkpoint/background/partner_copies.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>

#include <fmt/format.h>

#include "base/host_process.h"
#include "base/log.h"
#include "base/process.h"
#include "comm/confer.h"
#include "storage/arena/arenas.h"
#include "storage/arena/peer.h"
#include "tessera/error.h"

namespace tessera {

using std::chrono::milliseconds;

// One rank's snapshots, one after another.
class PartnerCopies::Copier {
 public:
  Copier(PartnerPlace owner, std::string trainer, milliseconds silence)
      : owner_(std::move(owner)),
        trainer_(std::move(trainer)),
        silence_(silence),
        server_({.silence = silence}) {}

  void run(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const auto failure = failure_of([&] { follow(stop); });
      if (stop.stop_requested()) return;
      if (failure) say(*failure);
      nap(failure ? silence_ : milliseconds(0), stop);
    }
  }

  void note_end_of_trainer() {
    const std::lock_guard lock(mutex_);
    is_ended_ = true;
    if (notice_) (void)failure_of([this] { notice_->note_end_of_trainer(); });
  }

 private:
  static constexpr milliseconds kBetweenTries{100};

  void follow(const std::stop_token& stop) {
    const RemoteArena remote(peer_address_from_text(owner_.address), silence_, stop);
    while (const auto part = remote.next_part(writer_, number_, stop)) {
      writer_ = part->writer;
      number_ = part->number;
      server_.serve_nothing();  // it is written over now
      take_back();
      const auto failure = failure_of([&] { copy(remote, *part, stop); });
      is_lost_ = is_lost_ && failure;
      if (!failure) continue;
      if (failure->code() == ErrorCode::not_found) {
        log(LogLevel::info,
            fmt::format("the next save came before {} was copied from {}", part->place, name()));
        continue;
      }
      // Of one that is there yet another try may come to its end.
      number_ = 0;
      writer_.clear();
      if (failure->code() != ErrorCode::corrupt) throw Error(*failure);
      nap(kBetweenTries, stop);  // the next one is being written over it, or the network is bad
    }
  }

  void take_back() {
    const std::lock_guard lock(mutex_);
    notice_.reset();
  }

  void copy(const RemoteArena& remote, const KeptPart& part, const std::stop_token& stop) {
    constexpr double kMegabyte = 1e6;
    const CopyOutcome outcome = copy_part(remote, part, copied_, stop);
    KeptPart kept = copied_.part().value();
    const std::lock_guard lock(mutex_);
    kept.trainer = is_ended_ ? kEnded : trainer_;
    kept.made = host_time();
    kept.run_mark = run_mark(kept.place);
    kept.peer = to_text(server_.address());
    notice_ = std::make_unique<KeptNotice>(std::move(kept));
    server_.serve(notice_->part());
    log(LogLevel::info,
        fmt::format(
            "has a copy of {} of {}: {:.1f} MB in {:.3f} s, {:.0f} MB/s", part.place, name(),
            static_cast<double>(outcome.bytes) / kMegabyte, outcome.seconds,
            static_cast<double>(outcome.bytes) / kMegabyte / std::max(outcome.seconds, 1e-9)));
  }

  // Once, until it comes back.
  void say(const Error& failure) {
    if (std::exchange(is_lost_, true)) return;
    log(LogLevel::warning, fmt::format("no snapshots are copied from {} any more: {}{}", name(),
                                       failure.what(), notice_ ? "; the last one stays" : ""));
  }

  [[nodiscard]] std::string name() const {
    return fmt::format("rank {} of {}", owner_.rank, owner_.host);
  }

  static void nap(milliseconds time, const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any changed;
    std::unique_lock lock(mutex);
    (void)changed.wait_for(lock, stop, time, [] { return false; });
  }

  const PartnerPlace owner_;
  const std::string trainer_;
  const milliseconds silence_;
  std::string writer_;  // of the last one, whether it was copied or not
  std::uint64_t number_ = 0;
  bool is_lost_ = false;
  CopiedPart copied_;
  ArenaServer server_;
  std::mutex mutex_;                    // guards the two that follow
  bool is_ended_ = false;               // the trainer of this process
  std::unique_ptr<KeptNotice> notice_;  // of copied_; goes before that
};

namespace {

// The ranks of each host, by the lowest of them.
std::map<int, std::vector<int>> ranks_of_hosts(const std::vector<PartnerRank>& ranks) {
  std::map<std::string, int> lowest;
  std::map<int, std::vector<int>> hosts;
  for (int rank = 0; rank < std::ssize(ranks); ++rank) {
    const std::string& host = ranks[static_cast<std::size_t>(rank)].host;
    hosts[lowest.try_emplace(host, rank).first->second].push_back(rank);
  }
  return hosts;
}

}  // namespace

PartnerRank own_partner_rank(PeerPlace place) {
  return {.host = notice_host(),
          .machine = same_host::boot_id(),
          .name = host_name(),
          .place = std::move(place)};
}

std::vector<int> partners_of(const std::vector<PartnerRank>& ranks) {
  std::vector<int> partners(ranks.size(), -1);
  const auto hosts = ranks_of_hosts(ranks);
  if (hosts.size() < 2) return partners;
  for (auto host = hosts.begin(); host != hosts.end(); ++host) {
    const auto after = std::next(host);
    const std::vector<int>& others = (after == hosts.end() ? hosts.begin() : after)->second;
    for (std::size_t i = 0; i < host->second.size(); ++i)
      partners[static_cast<std::size_t>(host->second[i])] = others[i % others.size()];
  }
  return partners;
}

std::string risk_text(const std::vector<PartnerRank>& ranks, const std::vector<int>& partners) {
  std::string text;
  std::map<std::pair<std::string, std::string>, bool> is_said;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (partners[rank] < 0) continue;
    const PartnerRank& own = ranks[rank];
    const PartnerRank& other = ranks[static_cast<std::size_t>(partners[rank])];
    if (own.machine.empty() || own.machine != other.machine) continue;
    if (std::exchange(is_said[{own.host, other.host}], true)) continue;
    text += fmt::format("{}ranks {} and {}", text.empty() ? "" : ", ", rank, partners[rank]);
  }
  return text;
}

namespace {

void say_partners(const std::vector<PartnerRank>& ranks, const std::vector<int>& partners) {
  if (partners.front() < 0) {
    log(LogLevel::warning,
        "all ranks are on one host: nobody has a copy of its snapshots (WriterOptions::partner)");
    return;
  }
  std::string pairs;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    pairs += fmt::format("{}{} to {}", rank == 0 ? "" : ", ", rank, partners[rank]);
  }
  log(LogLevel::info, fmt::format("snapshots of ranks are copied to partners: {}; from {}", pairs,
                                  ranks.front().place.interface));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const PartnerRank& partner = ranks[static_cast<std::size_t>(partners[rank])];
    const bool is_loopback = ranks[rank].place.address.starts_with("127.") ||
                             ranks[rank].place.address.starts_with("::1 ");
    if (!is_loopback || ranks[rank].machine == partner.machine) continue;
    log(LogLevel::warning,
        fmt::format("rank {} gives its snapshots on {}, which its partner on {} does not reach "
                    "(TESSERA_ARENA_IFNAME)",
                    rank, ranks[rank].place.interface, partner.name));
  }
  const std::string risk = risk_text(ranks, partners);
  if (!risk.empty()) {
    log(LogLevel::warning,
        "partners that run on one machine and are lost together with it: " + risk);
  }
}

}  // namespace

std::vector<PartnerPlace> choose_partners(Group& group, const std::function<PeerPlace()>& own) {
  using ByRank = std::map<std::int32_t, PartnerRank>;
  const auto contribute = [&] { return ByRank{{group.rank(), own_partner_rank(own())}}; };
  const auto join = [](ByRank& all, ByRank more) { all.merge(more); };
  const auto told = from_message<ByRank>(
      confer(group, "choosing partners", conference_of(contribute, join, std::identity())));
  std::vector<PartnerRank> ranks;
  for (const auto& [rank, one] : told) ranks.push_back(one);
  const std::vector<int> partners = partners_of(ranks);
  if (group.rank() == 0) say_partners(ranks, partners);
  std::vector<PartnerPlace> owners;
  for (int rank = 0; rank < std::ssize(ranks); ++rank) {
    const PartnerRank& one = ranks[static_cast<std::size_t>(rank)];
    if (partners[static_cast<std::size_t>(rank)] == group.rank())
      owners.push_back({rank, one.name, one.place.address});
  }
  return owners;
}

void PartnerCopies::note_end_of_trainer() {
  for (const auto& copier : copiers_) copier->note_end_of_trainer();
}

PartnerCopies::PartnerCopies(const std::vector<PartnerPlace>& owners, const std::string& trainer,
                             milliseconds silence) {
  for (const PartnerPlace& owner : owners) {
    const auto copier = std::make_shared<Copier>(owner, trainer, silence);
    copiers_.push_back(copier);
    threads_.emplace_back([copier](const std::stop_token& stop) { copier->run(stop); });
  }
}

}  // namespace tessera
