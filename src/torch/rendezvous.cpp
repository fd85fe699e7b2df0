#include "torch/rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/process.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/deadline_store.h"
#include "torch/torch_group.h"

namespace tessera {
namespace {

// torchrun names the place itself; to other launchers the user says it.
void require_meeting_place(const LaunchedRank& launched) {
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (std::getenv(name) != nullptr) continue;
    throw Error(ErrorCode::invalid_argument,
                std::string("environment variable ") + name + " is not set, and " +
                    launched.launcher + " started " + std::to_string(launched.size) +
                    " ranks: MASTER_ADDR is the host of rank 0, MASTER_PORT a free port there, the "
                    "same on all ranks");
  }
}

// The store that a launcher's variables lead to.
struct MeetingPlace {
  std::string address;  // of the store, and this rank
  c10::intrusive_ptr<c10d::Store> store;
};

// Never closed: a rank that is done with its mesh may serve another one's next.
MeetingPlace& meeting_place(const std::string& address,
                            const std::function<c10::intrusive_ptr<c10d::Store>()>& open) {
  static std::mutex mutex;
  static auto& places = *new std::list<MeetingPlace>;
  const std::lock_guard lock(mutex);
  const auto known = std::ranges::find(places, address, &MeetingPlace::address);
  if (known != places.end()) return *known;
  return places.emplace_back(MeetingPlace{address, open()});
}

// One attempt of one rank to be part of a mesh.
std::string key_of(const char* what, int rank, std::int64_t attempt) {
  return what + ("/" + std::to_string(rank)) + "/" + std::to_string(attempt);
}
std::string count_of(int rank) {
  return "attempts/" + std::to_string(rank);
}

// What ranks leave in a store to meet there. A rank counts its attempts and says that it is `here`
// for one. An attempt is `over` when its rank has given up, or when rank 0, which waits until all
// are here, has told it the number of the mesh that it is for. So attempts that failed are passed
// over on either side.
class Rendezvous {
  using Clock = std::chrono::steady_clock;

 public:
  Rendezvous(c10d::Store& store, int size, std::chrono::milliseconds deadline)
      : store_(store), size_(size), end_(Clock::now() + deadline) {}

  // Called by rank 0.
  std::string invite() {
    // Until nobody has given up while others were waited for.
    std::vector<std::int64_t> attempts(static_cast<std::size_t>(size_)), before;
    do {
      before = attempts;
      for (int rank = 1; rank < size_; ++rank) attempts[rank] = attempt_of(rank);
    } while (attempts != before);
    const auto number = std::to_string(store_.add("meshes", 1));
    for (int rank = 1; rank < size_; ++rank) {
      end(rank, attempts[rank]);
      store_.set(key_of("mesh", rank, attempts[rank]), number);
    }
    return number;
  }

  std::string join(int rank) {
    const auto attempt = store_.add(count_of(rank), 1);
    store_.set(key_of("here", rank, attempt), "");
    const auto mesh = key_of("mesh", rank, attempt);
    try {
      wait_for(0, mesh);
      return store_.get_to_str(mesh);
    } catch (const std::exception&) {
      try {
        end(rank, attempt);
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): nobody is there to meet
      }
      throw;
    }
  }

 private:
  // The newest that it is here for.
  std::int64_t attempt_of(int rank) {
    for (;;) {
      const auto attempt = store_.add(count_of(rank), 0);
      if (attempt > 0 && !store_.check({key_of("over", rank, attempt)})) return attempt;
      wait_for(rank, key_of("here", rank, attempt + 1));
    }
  }

  void wait_for(int rank, const std::string& key) {
    communicate("waiting for rank " + std::to_string(rank) + " to make a mesh", [&] {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now());
      store_.wait({key}, std::max(left, std::chrono::milliseconds(1)));
    });
  }

  void end(int rank, std::int64_t attempt) { store_.set(key_of("over", rank, attempt), ""); }

  c10d::Store& store_;
  int size_;
  Clock::time_point end_;
};

}  // namespace

// Under torchrun the agent serves the store; otherwise rank 0 does.
c10::intrusive_ptr<c10d::Store> store_from_environment(const LaunchedRank& launched,
                                                       std::chrono::milliseconds deadline) {
  const int rank = launched.rank, size = launched.size;
  require_meeting_place(launched);
  const std::string host = std::getenv("MASTER_ADDR");
  const char* agent_text = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool agent = agent_text != nullptr && std::string_view(agent_text) == "True";
  c10d::TCPStoreOptions store;
  store.port = static_cast<std::uint16_t>(
      number_of(environment_of_process, "MASTER_PORT", launched.launcher, 1, 65535));
  store.isServer = rank == 0 && !agent;
  store.numWorkers = static_cast<std::size_t>(size);
  // The agent's store counts no workers.
  store.waitWorkers = !agent;
  store.timeout = deadline;
  survive_broken_pipes();
  const auto address = host + ":" + std::to_string(store.port);
  // A child of fork() has none of its parent's connections.
  auto& place = meeting_place(address + " " + std::to_string(rank) + "/" + std::to_string(size) +
                                  " " + std::to_string(process_number()),
                              [&] {
                                return communicate("meeting the other ranks", [&] {
                                  return open_with_deadline(address, deadline, [host, store] {
                                    return c10::make_intrusive<c10d::TCPStore>(host, store);
                                  });
                                });
                              });
  place.store->setTimeout(deadline);
  // The agent's store outlives a restart of the ranks as well.
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return c10::make_intrusive<c10d::PrefixStore>(
      std::string("tessera/attempt/") + (restarts != nullptr ? restarts : "0"), place.store);
}

c10::intrusive_ptr<c10d::Store> meet(const c10::intrusive_ptr<c10d::Store>& given, int rank,
                                     int size, std::chrono::milliseconds deadline) {
  const auto store = with_deadline(given, deadline);
  c10d::PrefixStore place("tessera/rendezvous/" + std::to_string(size), store);
  Rendezvous ranks(place, size, deadline);
  const auto mesh = rank == 0 ? ranks.invite() : ranks.join(rank);
  return c10::make_intrusive<c10d::PrefixStore>("tessera/mesh/" + std::to_string(size) + "/" + mesh,
                                                store);
}

}  // namespace tessera
