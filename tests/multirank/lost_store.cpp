// The store where ranks meet is lost while they need it (fault-rows R09).
//   lost_store
// A process serves the store as torchrun's agent does, and is killed, or stopped as by a network
// that was cut: before ranks come, when they make a mesh, or when a mesh makes further connections.
// Each rank has to get an Error of the code that is meant, which names the store. All cases run at
// once. Prints the error of each rank, a line for each case that goes wrong and a summary; exits
// with 1 when one did.
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
// Long enough for all meshes to be made at once on a busy machine.
constexpr auto kDeadline = std::chrono::seconds(8);
constexpr auto kLimit = std::chrono::seconds(60);

enum class Moment { first_call, waiting, given, checkpoint_group, writer_group, split };
constexpr std::array kMoments{"its first call",     "another rank came", "a mesh of a given store",
                              "checkpoint_group()", "writer_group()",    "split()"};
enum class Way { killed, stopped };
constexpr std::array kWays{"killed", "stopped"};

// What the processes of a case share.
struct Shared {
  std::atomic<bool> is_serving = false;
  std::atomic<int> ready = 0;  // ranks that need the store next
  std::atomic<bool> is_lost = false;
};

struct Case {
  Moment moment = Moment::first_call;
  Way way = Way::killed;
  int port = 0;
  Shared* shared = nullptr;
  std::vector<tessera::testing::Child> store = {}, ranks = {};

  [[nodiscard]] std::string name() const {
    return std::string("the store is ") + kWays.at(static_cast<std::size_t>(way)) + " before " +
           kMoments.at(static_cast<std::size_t>(moment));
  }
  // Of those whose mesh it is, the others never come.
  [[nodiscard]] int ranks_that_come() const { return moment == Moment::waiting ? 1 : kWorld; }
  // Who is not there yet could still come, so that is waited for.
  [[nodiscard]] ErrorCode meant() const {
    return way == Way::killed && moment != Moment::first_call ? ErrorCode::peer_failed
                                                              : ErrorCode::timeout;
  }
};

void wait_until(const std::atomic<bool>& is_true) {
  while (!is_true) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

int serve(const Case& one) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(one.port);
  options.isServer = true;
  options.waitWorkers = false;
  c10d::TCPStore store("127.0.0.1", options);
  const auto keys = store.getNumKeys();
  one.shared->is_serving = true;
  if (one.moment == Moment::waiting) {
    // Rank 0 asks for the others, and waits.
    while (store.getNumKeys() == keys) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++one.shared->ready;
  }
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
  if (one.moment == Moment::given) {
    c10d::TCPStoreOptions place;
    place.port = static_cast<std::uint16_t>(one.port);
    place.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", place);
    lose_store(one);
    (void)Mesh(store, rank, kWorld, options);
    return;
  }
  if (one.moment == Moment::first_call) lose_store(one);
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
    std::printf("%s: rank %d heard of no error\n", one.name().c_str(), rank);
    return 1;
  } catch (const Error& error) {
    const bool names_store =
        std::string(error.what()).find(std::to_string(one.port)) != std::string::npos;
    std::printf("%s: rank %d got %s\n", one.name().c_str(), rank, error.what());
    return error.code() == one.meant() && names_store ? 0 : 1;
  }
}

void begin(Case& one) {
  one.shared = tessera::testing::shared_by_processes<Shared>();
  one.port = tessera::testing::free_port();
  one.store = tessera::testing::fork_ranks(1, [&](int) { return serve(one); });
  one.ranks = tessera::testing::fork_ranks(one.ranks_that_come(),
                                           [&](int rank) { return rank_of(one, rank); });
}

// Ranks that fail before are not waited for: they get no error that is meant.
void lose(const Case& one, tessera::testing::Clock::time_point end) {
  while (one.shared->ready < one.ranks_that_come() && tessera::testing::Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const pid_t store = one.store.front().process;
  ::kill(store, one.way == Way::killed ? SIGKILL : SIGSTOP);
  ::waitpid(store, nullptr, WUNTRACED);  // its threads may run a while longer
  one.shared->is_lost = true;
}

// Returns whether the ranks did as meant.
bool end(Case& one, tessera::testing::Clock::time_point end) {
  tessera::testing::wait_for(one.ranks, {.end = end});
  const std::string wrong =
      tessera::testing::end_all(one.ranks, [](int, int status) { return status == 0; });
  const pid_t store = one.store.front().process;
  ::kill(store, SIGKILL);
  ::waitpid(store, nullptr, 0);
  if (wrong.empty()) return true;
  std::printf("%s:%s\n", one.name().c_str(), wrong.c_str());
  return false;
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // libtorch's store asks for the name of whoever connects, which serves nobody for 5 s when the
  // name server loses the question.
  ::setenv("RES_OPTIONS", "timeout:1 attempts:1", 1);
  std::vector<Case> cases;
  // Who waits does so within the deadline, so it comes first.
  for (const auto moment : {Moment::waiting, Moment::first_call, Moment::given,
                            Moment::checkpoint_group, Moment::writer_group, Moment::split})
    for (const auto way : {Way::killed, Way::stopped}) cases.push_back({moment, way});
  for (Case& one : cases) begin(one);
  const auto limit = tessera::testing::Clock::now() + kLimit;
  for (const Case& one : cases) lose(one, limit);
  int wrong = 0;
  for (Case& one : cases) wrong += end(one, limit) ? 0 : 1;
  std::printf("%zu cases, %d wrong\n", cases.size(), wrong);
  return wrong == 0 ? 0 : 1;
}
