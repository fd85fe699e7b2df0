// How long does a restart take until all ranks have their state again, from the memory that writer
// processes have kept, and from the disk?
//   bench_restart --dir D --command TESSERA [--bytes B] [--ranks W] [--onto V] [--rounds R]
// W ranks (processes) with B bytes of tensors each (1.1 GB) save to D/run/step1 by writer processes
// and are killed. Then V ranks look for the latest checkpoint and load it, in turns from memory,
// from the disk with a cold page cache (posix_fadvise of the files, which are durable) and with a
// warm one; once to warm up, and then R times (5). The ranks' memory is there and touched before.
// Prints one line of JSON: of each way the seconds to find it and to load it, until the last rank
// has it, the largest peak of a rank's memory, and the bytes that came from the device.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "crash/socket_wire.h"
#include "measure.h"
#include "multirank/forked_ranks.h"
#include "rank_state.h"
#include "storage/arena/arenas.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/comm.h"
#include "tessera/run_directory.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)
using bench::now;
namespace fs = std::filesystem;

constexpr std::chrono::minutes kLimit{10};
constexpr int kMostRanks = 64;

struct Job {
  std::string directory, command;
  std::int64_t bytes = 1'100'000'000;
  int ranks = 2, onto = 2, rounds = 5;

  [[nodiscard]] std::string run() const { return directory + "/run"; }
  [[nodiscard]] bench::StateSize size_for(int world) const {
    const std::int64_t all = bytes * ranks;
    return {all, world, std::min<std::int64_t>(all / 4, 64 << 20)};
  }
};

// What the ranks of a start say, in memory that processes share.
struct Board {
  std::atomic<int> saved = 0;
  double begun[kMostRanks] = {}, found[kMostRanks] = {}, loaded[kMostRanks] = {};
  long peak[kMostRanks] = {};
  std::uint64_t read[kMostRanks] = {};
};
Board* board = nullptr;

// A way to start again, and what was measured of it.
struct Way {
  std::string name;
  bool from_memory = false, is_cold = false;
  std::vector<double> find = {}, load = {};
  long peak = 0;
  std::uint64_t read = 0;  // bytes from the device, of the last start
};

std::string arenas_of(const Job& job, bool has_any) {
  return job.directory + (has_any ? "/arenas" : "/none");
}

void require(bool well, const std::string& what) {
  if (!well) throw std::runtime_error(what);
}

void wait_for(std::vector<testing::Child>& ranks, bool are_killed) {
  testing::wait_for(ranks, {.end = testing::Clock::now() + kLimit});
  const std::string wrong = testing::end_all(ranks, [&](int, int status) {
    return are_killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0;
  });
  require(wrong.empty(), wrong);
}

std::vector<testing::Child> fork_ranks(int world,
                                       const std::function<void(Group& group, int rank)>& body) {
  return testing::fork_group(world, {.silence = std::chrono::seconds(60)}, kLimit,
                             [&](Group& group, int rank) {
                               try {
                                 body(group, rank);
                                 return 0;
                               } catch (const std::exception& error) {
                                 std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
                                 return 1;
                               }
                             });
}

// Returns how many bytes the tensors have.
std::int64_t train_and_die(const Job& job) {
  auto ranks = fork_ranks(job.ranks, [&](Group& group, int rank) {
    bench::RankState state(job.size_for(job.ranks), rank);
    WriterOptions options;
    options.process = true;
    options.program = job.command;
    options.idle = false;
    options.keep = std::chrono::hours(1);
    const std::shared_ptr<Group> own(&group, [](Group*) {});
    CheckpointWriter writer(own, options);
    writer.save(state.tree(), job.run() + "/step1").result();
    ++board->saved;
    while (true) ::pause();
  });
  const auto end = testing::Clock::now() + kLimit;
  while (board->saved < job.ranks && testing::Clock::now() < end) {
    testing::wait_for(ranks, {.end = testing::Clock::now() + std::chrono::milliseconds(5)});
    require(std::ranges::none_of(ranks, [](const auto& rank) { return rank.status.has_value(); }),
            "a rank has ended");
  }
  for (const auto& rank : ranks) ::kill(rank.process, SIGKILL);
  wait_for(ranks, true);
  return job.size_for(1).tensor_bytes * (job.bytes * job.ranks / job.size_for(1).tensor_bytes);
}

void drop_from_page_cache(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    require(file >= 0 && ::fsync(file) == 0, "fsync of " + entry.path().string());
    require(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0, "posix_fadvise");
    ::close(file);
  }
}

// Bytes that this process has read from a device.
std::uint64_t bytes_read() {
  std::ifstream counts("/proc/self/io");
  for (std::string line; std::getline(counts, line);)
    if (line.starts_with("read_bytes: ")) return std::strtoull(line.c_str() + 12, nullptr, 10);
  return 0;
}

void start(const Job& job, Way& way) {
  if (way.is_cold) drop_from_page_cache(job.run() + "/step1");
  auto ranks = fork_ranks(job.onto, [&](Group& group, int rank) {
    ::setenv("TESSERA_ARENA_DIR", arenas_of(job, way.from_memory).c_str(), 1);
    bench::RankState state(job.size_for(job.onto), rank);
    agree(group, "beginning", [] {});
    const std::uint64_t before = bytes_read();
    board->begun[rank] = now();
    const auto newest = latest_checkpoint(job.run(), {}, group).found;
    board->found[rank] = now();
    require(newest && to_string(newest->where).starts_with("arena://") == way.from_memory,
            way.name + ": the latest is " + (newest ? to_string(newest->where) : "none"));
    load(state.tree(), newest->where, group);
    board->loaded[rank] = now();
    board->read[rank] = bytes_read() - before;
    board->peak[rank] = bench::peak_memory();
  });
  wait_for(ranks, false);
  const int world = job.onto;
  const double begun = *std::min_element(board->begun, board->begun + world);
  const double found = *std::max_element(board->found, board->found + world);
  way.find.push_back(found - begun);
  way.load.push_back(*std::max_element(board->loaded, board->loaded + world) - found);
  way.peak = std::max(way.peak, *std::max_element(board->peak, board->peak + world));
  way.read = 0;
  for (int rank = 0; rank < world; ++rank) way.read += board->read[rank];
}

std::string list_of(const std::vector<double>& seconds) {
  std::string text;
  for (const double one : seconds) text += (text.empty() ? "" : ", ") + std::to_string(one);
  return "[" + text + "]";
}

void measure(const Job& job) {
  fs::create_directories(job.run());
  ::setenv("TESSERA_ARENA_DIR", arenas_of(job, true).c_str(), 1);
  const std::int64_t bytes = train_and_die(job);
  std::vector<Way> ways{
      {.name = "arena", .from_memory = true}, {.name = "cold", .is_cold = true}, {.name = "warm"}};
  for (int round = 0; round <= job.rounds; ++round) {
    for (Way& way : ways) {
      start(job, way);
      if (round > 0) continue;
      way.find.clear();
      way.load.clear();
    }
  }
  std::printf("{\"bytes\": %lld", static_cast<long long>(bytes));
  for (const Way& way : ways) {
    std::printf(", \"%s\": {\"find_s\": %s, \"load_s\": %s, \"peak_mib\": %ld, \"read\": %llu}",
                way.name.c_str(), list_of(way.find).c_str(), list_of(way.load).c_str(), way.peak,
                static_cast<unsigned long long>(way.read));
  }
  std::printf("}\n");
}

void end_writers() {
  const auto end = testing::Clock::now() + std::chrono::seconds(30);
  forget(kept_parts());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // they look every 0.1 s
  while (!kept_parts().empty() && testing::Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

}  // namespace

int main(int argc, char** argv) {
  Job job;
  CLI::App app;
  app.add_option("--dir", job.directory)->required();
  app.add_option("--command", job.command)->required();
  app.add_option("--bytes", job.bytes);
  app.add_option("--ranks", job.ranks)->check(CLI::Range(1, kMostRanks));
  app.add_option("--onto", job.onto)->check(CLI::Range(1, kMostRanks));
  app.add_option("--rounds", job.rounds);
  CLI11_PARSE(app, argc, argv);
  board = testing::shared_by_processes<Board>();
  int code = 0;
  try {
    measure(job);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 1;
  }
  end_writers();
  return code;
}
