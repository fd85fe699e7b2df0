// What do a save and a load cost beside the disk itself?
//   bench_saveload --bytes B --ranks N --dir D [--tensor-bytes T] [--rounds R]
// N ranks (threads of this process) save and load B bytes of float32 tensors of T bytes each (64
// MiB), of which each rank has its rows. The peer writes as many bytes by as many threads, each
// into a file of its own, 1 MiB at a time with an fsync at the end, and reads them back. Both write
// to a fresh place, durably, and read from the page cache into memory that was touched before. They
// take turns, once to warm up and then R times (5); with 0 the first time counts. Prints one line
// of JSON: medians in seconds, the tensors' bytes (there is one at least), and the process's peak
// of memory, in which these and the peer's memory count.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/parallel.h"
#include "measure.h"
#include "rank_state.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)
using tessera::bench::now;

constexpr std::size_t kBlock = 1 << 20;

struct Job : bench::StateSize {
  std::string directory;
  int rounds = 5;
};

void require(bool well, const char* what) {
  if (!well) throw std::runtime_error(std::string(what) + " failed");
}

void write_raw(const std::string& path, std::vector<char>& memory) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  require(file >= 0, "open");
  for (std::size_t at = 0; at < memory.size();) {
    const ssize_t written = ::pwrite(file, memory.data() + at, std::min(kBlock, memory.size() - at),
                                     static_cast<off_t>(at));
    require(written > 0, "write");
    at += static_cast<std::size_t>(written);
  }
  require(::fsync(file) == 0, "fsync");
  ::close(file);
}

void read_raw(const std::string& path, std::vector<char>& memory) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(file >= 0, "open");
  for (std::size_t at = 0; at < memory.size();) {
    const ssize_t got = ::pread(file, memory.data() + at, std::min(kBlock, memory.size() - at),
                                static_cast<off_t>(at));
    require(got > 0, "read");
    at += static_cast<std::size_t>(got);
  }
  ::close(file);
}

double seconds_of(const std::function<void()>& work) {
  const double begin = now();
  work();
  return now() - begin;
}

double median(std::vector<double> seconds) {
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

class Measured {
 public:
  explicit Measured(const Job& job)
      : job_(job), checkpoint_(job.directory + "/checkpoint"), raw_(job.directory + "/raw") {
    for (int rank = 0; rank < job.ranks; ++rank) {
      states_.emplace_back(job, rank);
      memory_.emplace_back(states_.back().bytes(), 'x');
    }
  }

  void rounds() {
    for (int round = 0; round <= job_.rounds; ++round) {
      if (round % 2 == 0) tessera_round();
      raw_round();
      if (round % 2 != 0) tessera_round();
      if (round == 0 && job_.rounds > 0) clear();
    }
  }

  void print() const {
    std::printf(
        "{\"save_s\": %.4f, \"load_s\": %.4f, \"raw_write_s\": %.4f, \"raw_read_s\": %.4f, "
        "\"bytes\": %zu, \"peak_mib\": %ld}\n",
        median(save_), median(load_), median(raw_write_), median(raw_read_), bytes(),
        bench::peak_memory());
  }

 private:
  void tessera_round() {
    std::filesystem::remove_all(checkpoint_);
    ::sync();
    save_.push_back(seconds_of([&] {
      run_ranks(
          job_.ranks, [&](Group& group) { save(state(group).tree(), checkpoint_, group); },
          std::chrono::minutes(10));
    }));
    load_.push_back(seconds_of([&] {
      run_ranks(
          job_.ranks, [&](Group& group) { load(state(group).tree(), checkpoint_, group); },
          std::chrono::minutes(10));
    }));
  }

  void raw_round() {
    std::filesystem::remove_all(raw_);
    std::filesystem::create_directories(raw_);
    ::sync();
    raw_write_.push_back(seconds_of([&] {
      of_each_rank([&](std::size_t rank) { write_raw(raw_file(rank), memory_[rank]); });
    }));
    raw_read_.push_back(seconds_of(
        [&] { of_each_rank([&](std::size_t rank) { read_raw(raw_file(rank), memory_[rank]); }); }));
  }

  [[nodiscard]] std::size_t bytes() const {
    std::size_t all = 0;
    for (const bench::RankState& state : states_) all += state.bytes();
    return all;
  }
  void of_each_rank(const std::function<void(std::size_t)>& work) const {
    parallel_for(job_.ranks, static_cast<std::size_t>(job_.ranks), work);
  }
  [[nodiscard]] std::string raw_file(std::size_t rank) const {
    return raw_ + "/" + std::to_string(rank);
  }
  [[nodiscard]] bench::RankState& state(const Group& group) {
    return states_[static_cast<std::size_t>(group.rank())];
  }
  void clear() {
    for (auto* seconds : {&save_, &load_, &raw_write_, &raw_read_}) seconds->clear();
  }

  const Job& job_;
  std::string checkpoint_, raw_;
  std::vector<bench::RankState> states_;
  std::vector<std::vector<char>> memory_;  // of the peer
  std::vector<double> save_, load_, raw_write_, raw_read_;
};

bool parse(const std::vector<std::string>& arguments, Job& job) {
  if (arguments.size() % 2 != 0) return false;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& option = arguments[i];
    const std::string& value = arguments[i + 1];
    if (option == "--bytes") {
      job.bytes = std::atoll(value.c_str());
    } else if (option == "--ranks") {
      job.ranks = std::atoi(value.c_str());
    } else if (option == "--dir") {
      job.directory = value;
    } else if (option == "--tensor-bytes") {
      job.tensor_bytes = std::atoll(value.c_str());
    } else if (option == "--rounds") {
      job.rounds = std::atoi(value.c_str());
    } else {
      return false;
    }
  }
  return job.bytes > 0 && job.ranks > 0 && !job.directory.empty() && job.tensor_bytes >= 4 &&
         job.rounds >= 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Job job;
    if (!parse({argv + 1, argv + argc}, job)) {
      std::fprintf(stderr,
                   "usage: bench_saveload --bytes B --ranks N --dir D [--tensor-bytes T] "
                   "[--rounds R]\n");
      return 2;
    }
    Measured measured(job);
    measured.rounds();
    measured.print();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_saveload: %s\n", error.what());
    return 3;
  }
}
