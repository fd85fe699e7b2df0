// The store where ranks meet is lost while they need it (fault-rows R09).
//   lost_store
// A process serves the store as torchrun's agent does, and is killed, or stopped as by a network
// that was cut: when ranks come to make a mesh, or when a mesh makes further connections. Each rank
// has to get an Error that says what it waited for. All cases run at once. Prints a line for each
// that goes wrong and a summary; exits with 1 when one did.
#include <signal.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "forked_ranks.h"
#include "tessera/error.h"
#include "tessera/mesh.h"

namespace {

using tessera::Error;
using tessera::ErrorCode;
using tessera::Mesh;

constexpr int kWorld = 2;
constexpr auto kDeadline = std::chrono::seconds(4);
constexpr auto kLimit = std::chrono::seconds(60);

enum class Moment { mesh, checkpoint_group, writer_group, split };
constexpr std::array kMoments{"a mesh", "checkpoint_group()", "writer_group()", "split()"};
enum class Way { killed, stopped };
constexpr std::array kWays{"killed", "stopped"};

// What the processes of a case share.
struct Shared {
  std::atomic<bool> is_serving = false;
  std::atomic<int> ready = 0;  // ranks that need the store next
  std::atomic<bool> is_lost = false;
};

struct Case {
  Moment moment = Moment::mesh;
  Way way = Way::killed;
  int port = 0;
  Shared* shared = nullptr;
  std::vector<tessera::testing::Child> store = {}, ranks = {};
};

void wait_until(const std::atomic<bool>& is_true) {
  while (!is_true) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

int serve(const Case& one) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(one.port);
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", options);
  one.shared->is_serving = true;
  while (true) ::pause();
}

void lose_store(const Case& one) {
  ++one.shared->ready;
  wait_until(one.shared->is_lost);
}

void need_store(const Case& one, int rank) {
  tessera::testing::set_environment(rank, kWorld, one.port);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  torch::set_num_threads(1);
  tessera::MeshOptions options;
  options.device = torch::kCPU;
  options.deadline = kDeadline;
  options.silence = kDeadline;
  if (one.moment == Moment::mesh) {
    // Rank 1 never comes: rank 0 has met the store, and waits there.
    std::thread([&one] {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      one.shared->ready = kWorld;
    }).detach();
    if (rank == 1) throw Error(ErrorCode::timeout, "has nothing to do");
    (void)Mesh::from_environment(options);
    return;
  }
  const Mesh mesh = Mesh::from_environment(options);
  lose_store(one);
  if (one.moment == Moment::checkpoint_group) {
    mesh.checkpoint_group().broadcast({}, 0);
  } else if (one.moment == Moment::writer_group) {
    mesh.writer_group()->broadcast({}, 0);
  } else {
    (void)mesh.split(1);
  }
}

int rank_of(const Case& one, int rank) {
  wait_until(one.shared->is_serving);
  try {
    need_store(one, rank);
    std::printf("rank %d heard of no error, the store was %s before %s\n", rank,
                kWays.at(static_cast<std::size_t>(one.way)),
                kMoments.at(static_cast<std::size_t>(one.moment)));
    return 1;
  } catch (const Error& error) {
    const bool is_meant = error.code() == ErrorCode::timeout || error.code() == ErrorCode::io ||
                          error.code() == ErrorCode::peer_failed;
    std::printf("%s: %s\n", kMoments.at(static_cast<std::size_t>(one.moment)), error.what());
    return is_meant ? 0 : 1;
  }
}

void begin(Case& one) {
  one.shared = tessera::testing::shared_by_processes<Shared>();
  one.port = tessera::testing::free_port();
  one.store = tessera::testing::fork_ranks(1, [&](int) { return serve(one); });
  one.ranks = tessera::testing::fork_ranks(kWorld, [&](int rank) { return rank_of(one, rank); });
}

// Returns whether the ranks did as meant.
bool end(Case& one) {
  while (one.shared->ready < kWorld) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const pid_t store = one.store.front().process;
  ::kill(store, one.way == Way::killed ? SIGKILL : SIGSTOP);
  one.shared->is_lost = true;
  tessera::testing::wait_for(one.ranks, {.end = tessera::testing::Clock::now() + kLimit});
  const std::string wrong =
      tessera::testing::end_all(one.ranks, [](int, int status) { return status == 0; });
  ::kill(store, SIGKILL);
  ::waitpid(store, nullptr, 0);
  if (wrong.empty()) return true;
  std::printf("the store is %s before %s:%s\n", kWays.at(static_cast<std::size_t>(one.way)),
              kMoments.at(static_cast<std::size_t>(one.moment)), wrong.c_str());
  return false;
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<Case> cases;
  for (const auto moment :
       {Moment::mesh, Moment::checkpoint_group, Moment::writer_group, Moment::split})
    for (const auto way : {Way::killed, Way::stopped}) cases.push_back({moment, way});
  for (Case& one : cases) begin(one);
  int wrong = 0;
  for (Case& one : cases) wrong += end(one) ? 0 : 1;
  std::printf("%zu cases, %d wrong\n", cases.size(), wrong);
  return wrong == 0 ? 0 : 1;
}
