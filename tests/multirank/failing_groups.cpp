// Ranks that fail while they agree over Mesh::checkpoint_group(): all others have to learn who.
//   failing_groups RUNS SEED [DIRECTORY]
// First it counts the connections of eight ranks. Then each run forks two to four ranks that agree,
// confer and work long, call after call. One of them throws in a call, or is killed, stopped or
// paused at a random moment. What throws has to be everyone's error, and the group goes on; a pause
// must not be noticed; a rank that is killed or stopped has to be named by all others, and one that
// runs again later has to end as well. Prints one line a failure and a summary; exits with 1 when a
// run went wrong.
//
//   failing_groups phases DIRECTORY EVERY
// One of 2 to 8 ranks is killed or stopped in each phase of a save by name, while it replaces a
// checkpoint. The others name it, the directory holds the one checkpoint or the other as the phase
// says, and committed() knows which. Takes every EVERYth of these runs (1: all);
// tests/crash/failing_phases.cpp has the same for each kind of directory, over sockets.
//
// With a DIRECTORY ranks save and load a checkpoint there instead. What a load gives has to be what
// the save before it got, and after each run the directory has to hold a whole checkpoint or none.
#include <dirent.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/confer.h"
#include "comm/long_work.h"
#include "forked_ranks.h"
#include "layout/boxes.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/verify.h"

namespace {

using std::chrono::milliseconds;
using tessera::testing::Clock;
constexpr milliseconds kSilence{1500};
constexpr milliseconds kPause{500};
constexpr auto kLimit = std::chrono::seconds(40);  // of a run
constexpr int kDone = 0, kWrong = 1, kNoticed = 3;
constexpr int kCalls = 40;
constexpr std::int64_t kRows = 1000;  // of the tensor that is saved

enum class Way { throws, killed, stopped, paused };
constexpr std::array kWayNames{"throws", "is killed", "is stopped", "is paused"};

struct Run {
  int world = 2;
  int victim = 0;
  Way way = Way::throws;
  unsigned seed = 0;  // of what is called
  int call = 0;       // in which the victim throws
  int moment_us = 0;  // otherwise: after the first call
  int port = 0;
  std::string directory;  // empty: ranks save nothing
  std::string phase;      // of a save: the victim fails when it has ended it; "writing": inside
};

std::string describe(const Run& run) {
  return std::to_string(run.world) + " ranks: rank " + std::to_string(run.victim) + " " +
         kWayNames[static_cast<int>(run.way)] +
         (!run.phase.empty()       ? " at '" + run.phase + "'"
          : run.way == Way::throws ? " in call " + std::to_string(run.call)
                                   : " after " + std::to_string(run.moment_us) + " us") +
         ", seed " + std::to_string(run.seed);
}

tessera::Mesh mesh_of(const Run& run, int rank) {
  tessera::testing::set_environment(rank, run.world, run.port);
  torch::set_num_threads(1);
  tessera::MeshOptions options;
  options.device = torch::kCPU;
  options.deadline = std::chrono::seconds(30);
  options.silence = kSilence;
  return tessera::Mesh::from_environment(options);
}

void wait_for_peers(const std::stop_token& stop) {
  const auto end = Clock::now() + milliseconds(20);
  while (Clock::now() < end && !stop.stop_requested()) std::this_thread::sleep_for(milliseconds(1));
  if (stop.stop_requested()) throw tessera::Error(tessera::ErrorCode::cancelled, "asked to stop");
}

// One call, of a kind that all ranks draw alike. `work` may throw.
void call(tessera::Group& group, std::mt19937& random, const std::function<void()>& work) {
  const auto kind = random() % 3;
  const auto size = random() % (3 << 20);
  if (kind == 0) {
    tessera::agree(group, "agreeing", work);
  } else if (kind == 1) {
    tessera::agree_on_long_work(group, "working", {}, [&](const std::stop_token& stop) {
      work();
      wait_for_peers(stop);
    });
  } else {
    const auto contribute = [&] {
      work();
      return tessera::Bytes(size);
    };
    const auto joined = [](tessera::Bytes left, const tessera::Bytes& right) {
      left.insert(left.end(), right.begin(), right.end());
      return left;
    };
    const auto all = tessera::confer(
        group, "conferring", {contribute, joined, [](tessera::Bytes bytes) { return bytes; }});
    if (all.size() != size * static_cast<std::size_t>(group.size()))
      throw std::runtime_error("a message of another length");
  }
}

// This rank's rows of a tensor whose elements are `first`.
tessera::Tensor rows_of(const tessera::Group& group, std::vector<float>& memory, float first) {
  tessera::Tensor tensor;
  tensor.shape = {kRows, 64};
  tensor.sharded = true;
  tensor.placement = tessera::Placement{.parts = group.size()};
  for (tessera::Box& box : tessera::boxes_of_part(*tensor.placement, tensor.shape, group.rank())) {
    memory.assign(static_cast<std::size_t>(tessera::numel(box)), first);
    auto storage = std::make_shared<tessera::Storage>();
    storage->data = reinterpret_cast<std::byte*>(memory.data());
    storage->size = memory.size() * sizeof(float);
    tensor.pieces.push_back({std::move(box), std::move(storage), 0, {}, -1});
  }
  return tensor;
}

// Saves or loads, as all ranks draw alike. `saved`: what the checkpoint that is there holds.
void save_or_load(const Run& run, tessera::Group& group, std::mt19937& random, float& saved,
                  const std::function<void()>& work) {
  std::vector<float> memory;
  const auto hook = [&](const tessera::Progress&) { work(); };
  const bool loads = random() % 2 == 0 && saved > 0;
  if (!loads) {
    const float next = saved + 1;
    tessera::SaveOptions options{.overwrite = true, .threads = 1, .progress = hook};
    tessera::save(tessera::Value::dict({{"w", rows_of(group, memory, next)}, {"n", next}}),
                  run.directory, options, group);
    saved = next;
    return;
  }
  tessera::Value tree = tessera::Value::dict({{"w", rows_of(group, memory, 0)}, {"n", 0}});
  tessera::load(tree, run.directory, {.threads = 1, .progress = hook}, group);
  for (const float element : memory) {
    if (element != saved) throw std::runtime_error("a load gave other values than were saved");
  }
}

// As the calls go for a rank; whether they went as they have to.
bool go_through_calls(const Run& run, tessera::Group& group, float& saved) {
  std::mt19937 random(run.seed);
  for (int i = 0; i < kCalls; ++i) {
    const bool throws = run.way == Way::throws && i == run.call;
    try {
      const auto work = [&] {
        if (throws && group.rank() == run.victim) throw std::runtime_error("bad batch");
      };
      if (run.directory.empty()) {
        call(group, random, work);
      } else {
        save_or_load(run, group, random, saved, work);
      }
      if (throws) return false;
    } catch (const tessera::Error& error) {
      if (!throws || error.peers().count(run.victim) != 1 || error.peers().size() != 1) throw;
    }
  }
  return true;
}

bool names_victim(const Run& run, const tessera::Error& error) {
  const std::string name = "rank " + std::to_string(run.victim);
  const std::string text = error.what();
  if (run.way == Way::killed) {
    return error.code() == tessera::ErrorCode::peer_failed &&
           text.find(name + " is gone") != std::string::npos;
  }
  return run.way == Way::stopped && error.code() == tessera::ErrorCode::timeout &&
         text.find(name + " has given no sign of life") != std::string::npos;
}

void save_number(const Run& run, tessera::Group& group, float number,
                 const std::function<void(const std::string& phase)>& reached) {
  std::vector<float> memory;
  tessera::SaveOptions options{.overwrite = true, .threads = 1};
  options.progress = [&](const tessera::Progress&) { reached("writing"); };
  options.events = [&](const tessera::Event& event) { reached(std::string(event.phase)); };
  const auto result =
      tessera::save(tessera::Value::dict({{"w", rows_of(group, memory, number)}, {"n", number}}),
                    run.directory, options, group);
  if (!tessera::committed(run.directory, result.save_id))
    throw std::runtime_error("a save that ended well is not there");
}

bool is_saved_before_end(const Run& run) {
  return run.phase == "commit" || run.phase == "all";
}

// An outcome that a rank does not know can be asked for: whether the answer is right.
bool answers(const Run& run, const tessera::Error& error) {
  const std::string text = error.what(), begin = "whether save ";
  const auto at = text.find(begin);
  if (at == std::string::npos) return true;
  const std::string id = text.substr(at + begin.size(), 36);
  return tessera::committed(run.directory, id) == is_saved_before_end(run);
}

// Saves a checkpoint and begins to replace it. Throws what tells of the victim.
void fail_in_phase(const Run& run, tessera::Group& group) {
  save_number(run, group, 1, [](const std::string&) {});
  bool reached_it = false;
  try {
    save_number(run, group, 2, [&](const std::string& phase) {
      if (group.rank() != run.victim || phase != run.phase || reached_it) return;
      reached_it = true;
      ::kill(::getpid(), run.way == Way::killed ? SIGKILL : SIGSTOP);
    });
  } catch (const tessera::Error& error) {
    if (answers(run, error)) throw;
    throw std::runtime_error(std::string("committed() is wrong: ") + error.what());
  }
  if (!is_saved_before_end(run)) throw std::runtime_error("saved without the victim");
  group.barrier();
}

// In the forked process; its exit code.
int take_part(const Run& run, int rank) {
  std::optional<tessera::Mesh> mesh;
  try {
    mesh = mesh_of(run, rank);
    tessera::Group& group = mesh->checkpoint_group();
    group.barrier();
    if (!run.phase.empty()) {
      fail_in_phase(run, group);
      // A rank that runs again still finds what the others sent before they gave up.
      return rank == run.victim ? kNoticed : kWrong;
    }
    if (rank == run.victim && run.way != Way::throws) {
      const int signal = run.way == Way::killed ? SIGKILL : SIGSTOP;
      std::thread([after = run.moment_us, signal] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        ::kill(::getpid(), signal);
      }).detach();
    }
    bool well = true;
    float saved = 0;
    do {
      well = go_through_calls(run, group, saved);
    } while (well && (run.way == Way::killed || run.way == Way::stopped));
    return well ? kDone : kWrong;
  } catch (const tessera::Error& error) {
    if (rank == run.victim && run.way == Way::stopped) return kNoticed;
    if (names_victim(run, error)) return kNoticed;
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return kWrong;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return kWrong;
  }
}

bool as_meant(const Run& run, int rank, int status) {
  if (rank == run.victim && run.way == Way::killed)
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  const bool noticed = run.way == Way::killed || run.way == Way::stopped;
  return WIFEXITED(status) && WEXITSTATUS(status) == (noticed ? kNoticed : kDone);
}

std::string end_all(const Run& run, std::vector<tessera::testing::Child>& children) {
  return tessera::testing::end_all(
      children, [&](int rank, int status) { return as_meant(run, rank, status); });
}

// What is wrong with what a run left; empty: nothing.
std::string check_directory(const Run& run) {
  if (run.directory.empty()) return "";
  if (!run.phase.empty()) {
    const auto n = tessera::Checkpoint::open(run.directory).load().at("n");
    if (n != tessera::Value(is_saved_before_end(run) ? 2.0 : 1.0))
      return " the directory holds the other one of the two checkpoints";
  }
  if (!std::filesystem::exists(run.directory + "/.metadata")) return "";
  const tessera::VerifyReport report = tessera::verify(run.directory);
  return report.findings.empty() ? "" : " " + report.findings.front().text;
}

std::string carry_out(const Run& run) {
  auto children =
      tessera::testing::fork_ranks(run.world, [&](int rank) { return take_part(run, rank); });
  const auto end = Clock::now() + kLimit;
  const bool stopped = run.way == Way::stopped;
  tessera::testing::Waiting waiting{.end = end, .without = stopped ? run.victim : -1};
  if (run.way == Way::paused) waiting.pause = kPause;
  wait_for(children, waiting);
  if (stopped) {
    ::kill(children[run.victim].process, SIGCONT);
    wait_for(children, {.end = end});
  }
  return end_all(run, children) + check_directory(run);
}

// The number of this process's sockets that are connected with another one.
int connections() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    count += ::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 ? 1 : 0;
  }
  return count;
}

// Rank 0 has an edge to each of the others, and these have one.
std::string count_connections() {
  const Run run{.world = 8, .port = tessera::testing::free_port()};
  auto children = tessera::testing::fork_ranks(run.world, [&](int rank) -> int {
    try {
      const auto mesh = mesh_of(run, rank);
      const int before = connections();
      mesh.checkpoint_group().barrier();
      const int made = connections() - before;
      mesh.checkpoint_group().barrier();
      if (made == (rank == 0 ? 7 : 1)) return kDone;
      std::fprintf(stderr, "rank %d: %d connections\n", rank, made);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    return kWrong;
  });
  wait_for(children, {.end = Clock::now() + kLimit});
  return end_all(run, children);
}

Run draw(const tessera::testing::Below& below, const std::string& directory) {
  Run run;
  run.world = 2 + below(3);
  run.victim = below(run.world);
  run.way = static_cast<Way>(below(4));
  run.seed = static_cast<unsigned>(below(1 << 30));
  run.call = below(kCalls);
  run.moment_us = below(300000);
  run.port = tessera::testing::free_port();
  run.directory = directory;
  return run;
}

// Each phase, each rank of `world`, and of these every `every`th; returns how many runs went wrong.
int fail_in_phases(int world, Way way, const std::string& directory, int every) {
  int wrong = 0, count = 0, done = 0;
  for (const char* phase : {"plan", "writing", "write", "commit", "all"}) {
    for (int victim = 0; victim < world; ++victim) {
      if (count++ % every != 0) continue;
      ++done;
      std::filesystem::remove_all(directory);
      Run run{.world = world, .victim = victim, .way = way};
      run.port = tessera::testing::free_port();
      run.directory = directory;
      run.phase = phase;
      const std::string text = carry_out(run);
      if (text.empty()) continue;
      ++wrong;
      std::printf("%s:%s\n", describe(run).c_str(), text.c_str());
    }
  }
  std::printf("%d runs in which a rank %s in a phase, %d wrong\n", done,
              kWayNames[static_cast<int>(way)], wrong);
  return wrong;
}

int fail_in_phases(const std::string& directory, int every) {
  int wrong = 0;
  for (const int world : {2, 4, 8}) wrong += fail_in_phases(world, Way::killed, directory, every);
  return wrong + fail_in_phases(3, Way::stopped, directory, every);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "phases")
    return fail_in_phases(argv[2], std::max(1, std::atoi(argv[3]))) == 0 ? 0 : 1;
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr,
                 "usage: failing_groups RUNS SEED [DIRECTORY]\n"
                 "       failing_groups phases DIRECTORY EVERY\n");
    return 2;
  }
  const std::string directory = argc == 4 ? argv[3] : "";
  const std::string wrong = count_connections();
  if (!wrong.empty()) std::printf("connections of 8 ranks:%s\n", wrong.c_str());
  const auto next = [&](const tessera::testing::Below& below) -> tessera::testing::Outcome {
    const Run run = draw(below, directory);
    if (!directory.empty()) std::filesystem::remove_all(directory);
    return {describe(run), carry_out(run)};
  };
  const auto seed = static_cast<unsigned>(std::atoi(argv[2]));
  const int wrong_runs = tessera::testing::repeat(std::atoi(argv[1]), seed, next);
  return wrong.empty() && wrong_runs == 0 ? 0 : 1;
}
