#include "checkpoint/save/probe.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/host.h"
#include "base/look_again.h"
#include "base/named.h"
#include "base/random_id.h"
#include "checkpoint/save/data_file.h"
#include "comm/long_work.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "tessera-", kSuffix = ".probe";

// A client of a network file system may remember that there is no such directory, until it makes
// one itself and hears that it is there.
void make_directory(Store& store, const std::string& name) {
  try {
    (void)store.create(name, IfExists::replace);
  } catch (const Error&) {
    return;  // what cannot be written here, the save itself will say
  }
}

}  // namespace

std::string probe_name(const std::string& attempt) {
  return std::string(kPrefix) + attempt + std::string(kSuffix);
}

bool is_probe_name(std::string_view name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return false;
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSuffix.size());
  return is_attempt(name);
}

Probe::Probe(std::shared_ptr<Store> store, std::string name)
    : store_(std::move(store)), name_(std::move(name)) {
  try {
    put(*store_, name_, std::as_bytes(std::span(name_)), IfExists::fail);
  } catch (...) {
    remove_quietly(*store_, name_);  // it may have its name, and fail behind that
    throw;
  }
}

Probe::~Probe() {
  if (made_here_) remove_quietly(*store_, name_);
}

bool shows_probe(const Store& store, const std::string& name) {
  try {
    (void)store.open(name);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return false;
  }
}

void ProbeLook::look(const std::shared_ptr<Store>& store, const std::string& name) {
  sees_ = shows_probe(*store, name);
  if (sees_ || !store->may_show_late()) return;
  sees_ = look_again([&] {
    make_directory(*store, name);
    return shows_probe(*store, name);
  });
  if (sees_) return;
  try {
    own_.emplace(store, probe_name(random_attempt()));
  } catch (const Error&) {
    return;  // rank 0 looks for none
  }
}

void ProbeLook::tell(Unseeing& unseeing, int rank) const {
  if (!sees_) unseeing.ranks.push_back({rank, host_name(), own_ ? own_->name() : std::string()});
}

void Unseeing::add(const Unseeing& higher) {
  more += higher.more;
  for (const Rank& rank : higher.ranks) {
    if (ranks.size() < Named::kMost) {
      ranks.push_back(rank);
    } else {
      ++more;
    }
  }
}

void write_unseeing(MessageWriter& message, const Unseeing& unseeing) {
  message.count(unseeing.ranks.size());
  for (const auto& [rank, host, probe] : unseeing.ranks)
    message.count(static_cast<std::uint64_t>(rank)).text(host).text(probe);
  message.count(unseeing.more);
}

Unseeing read_unseeing(MessageReader& message) {
  Unseeing unseeing;
  for (auto count = message.count(); count > 0; --count) {
    const int rank = static_cast<int>(message.count());
    std::string host = message.text();
    unseeing.ranks.push_back({rank, std::move(host), message.text()});
  }
  unseeing.more = message.count();
  return unseeing;
}

// Nobody has asked for these names here before, so no cache says that they are not there.
bool see_late(const Unseeing& unseeing, const Store& store, const std::string& own) {
  return !unseeing.ranks.empty() && shows_probe(store, own) &&
         std::ranges::all_of(unseeing.ranks, [&](const Unseeing::Rank& rank) {
           return !rank.probe.empty() && shows_probe(store, rank.probe);
         });
}

void await_probe(Group& group, const Store& store, const std::string& name,
                 const std::stop_token& stop) {
  bool sees = true;
  const auto work = [&](const std::stop_token& stopped) {
    sees = look_until_visible(stopped, [&] { return shows_probe(store, name); });
  };
  const auto contribute = [&] {
    Unseeing mine;
    if (!sees) mine.ranks.push_back({group.rank(), host_name()});
    MessageWriter message;
    write_unseeing(message, mine);
    return message.take();
  };
  const auto combine = [](const Bytes& left, const Bytes& right) {
    MessageReader first(left), second(right);
    Unseeing both = read_unseeing(first);
    both.add(read_unseeing(second));
    MessageWriter message;
    write_unseeing(message, both);
    return message.take();
  };
  const auto conclude = [&](const Bytes& all) {
    MessageReader message(all);
    require_seen_by_all(read_unseeing(message), group.size(), store);
    return Bytes();
  };
  (void)confer_after_long_work(group, stop, work, "waiting for a directory to appear",
                               {contribute, combine, conclude});
}

void require_seen_by_all(const Unseeing& unseeing, int ranks, const Store& store) {
  if (unseeing.ranks.empty()) return;
  Named named;
  for (const auto& [rank, host, probe] : unseeing.ranks) named.add(rank_on_host(rank, host));
  named.add_unnamed(unseeing.more);
  throw Error(ErrorCode::incomplete,
              std::to_string(named.count()) + " of " + std::to_string(ranks) +
                  " ranks do not see what rank 0 on " + host_name() + " has put there (" +
                  named.text() +
                  "): do the ranks write into different directories, or to disks of their own?")
      .at_path(store.name());
}

}  // namespace tessera
