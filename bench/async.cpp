// How long does a save in the background keep a training waiting?
//   bench_async --bytes B --dir D [--tensor-bytes T] [--rounds R] [--threads N] [--process COMMAND]
// One rank saves B bytes of float32 tensors of T bytes each (64 MiB) by a CheckpointWriter whose
// arena was made before, N threads copying (2). With COMMAND, which is `tessera`, a process of its
// own writes. The peer copies the same tensors by as many threads
// with memcpy into memory that was touched before. They take turns, the save while no other one is
// under way, once to warm up and then R times (5). Prints one line of JSON: the first call of
// save(), medians of the later ones (stall_s), of the copies, and of the time until each save was
// decided (decided_s), in seconds; and the process's peak of memory, in which the tensors, the
// arena and the peer's memory count.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/parallel.h"
#include "measure.h"
#include "rank_state.h"
#include "tessera/checkpoint_writer.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)
using tessera::bench::now;

struct Job : bench::StateSize {
  std::string directory;
  int rounds = 5;
  int threads = 2;
  std::string process;  // the command; empty: a thread writes
};

double median_of(std::vector<double> seconds) {
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

class AsyncBench {
 public:
  explicit AsyncBench(const Job& job)
      : job_(job),
        state_(job, 0),
        peer_(state_.bytes(), 'x'),
        writer_({.bytes = CheckpointWriter::bytes_of(state_.tree()),
                 .threads = job.threads,
                 .process = !job.process.empty(),
                 .program = job.process}) {}

  void rounds() {
    for (int round = 0; round <= job_.rounds; ++round) {
      if (round % 2 == 0) save_round(round);
      const double begin = now();
      copy();
      if (round > 0) copy_.push_back(now() - begin);
      if (round % 2 != 0) save_round(round);
    }
  }

  void print() const {
    std::printf(
        "{\"stall_s\": %.4f, \"copy_s\": %.4f, \"first_s\": %.4f, \"decided_s\": %.4f, "
        "\"bytes\": %zu, \"peak_mib\": %ld}\n",
        median_of(stall_), median_of(copy_), first_, median_of(decided_), state_.bytes(),
        bench::peak_memory());
  }

 private:
  void save_round(int round) {
    const std::string place = job_.directory + "/checkpoint";
    std::filesystem::remove_all(place);
    const double begin = now();
    const PendingSave pending = writer_.save(state_.tree(), place);
    const double stall = now() - begin;
    pending.result();
    if (round == 0) {
      first_ = stall;
      return;
    }
    stall_.push_back(stall);
    decided_.push_back(now() - begin);
  }

  // In parts as large for all threads.
  void copy() {
    constexpr std::size_t kPart = 32 << 20;
    struct Part {
      const std::byte* from;
      std::size_t to, size;
    };
    std::vector<Part> parts;
    std::size_t to = 0;
    for (const auto& [name, tensor] : state_.tree().pairs()) {
      for (const Piece& piece : tensor.as_tensor().pieces) {
        for (std::size_t at = 0; at < piece.storage->size; at += kPart) {
          const auto size = std::min<std::size_t>(kPart, piece.storage->size - at);
          parts.push_back({piece.storage->data + at, to, size});
          to += size;
        }
      }
    }
    parallel_for(job_.threads, parts.size(), [&](std::size_t i) {
      std::memcpy(peer_.data() + parts[i].to, parts[i].from, parts[i].size);
    });
  }

  const Job& job_;
  bench::RankState state_;
  std::vector<char> peer_;
  CheckpointWriter writer_;
  double first_ = 0;
  std::vector<double> stall_, copy_, decided_;
};

bool parse(const std::vector<std::string>& arguments, Job& job) {
  if (arguments.size() % 2 != 0) return false;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string_view option = arguments[i];
    const char* value = arguments[i + 1].c_str();
    if (option == "--bytes") {
      job.bytes = std::atoll(value);
    } else if (option == "--dir") {
      job.directory = value;
    } else if (option == "--tensor-bytes") {
      job.tensor_bytes = std::atoll(value);
    } else if (option == "--rounds") {
      job.rounds = std::atoi(value);
    } else if (option == "--threads") {
      job.threads = std::atoi(value);
    } else if (option == "--process") {
      job.process = value;
    } else {
      return false;
    }
  }
  return job.bytes > 0 && !job.directory.empty() && job.tensor_bytes >= 4 && job.rounds > 0 &&
         job.threads > 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Job job;
    job.ranks = 1;
    if (!parse({argv + 1, argv + argc}, job)) {
      std::fprintf(stderr,
                   "usage: bench_async --bytes B --dir D [--tensor-bytes T] [--rounds R] "
                   "[--threads N] [--process COMMAND]\n");
      return 2;
    }
    AsyncBench bench(job);
    bench.rounds();
    bench.print();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_async: %s\n", error.what());
    return 3;
  }
}
