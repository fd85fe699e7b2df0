// What do the plan and the metadata of a save cost, the first time and again?
//   bench_second_save --ranks N --tensors T [--rounds R] [--to PLACE]
// N ranks (threads of this process) save T float32 tensors, of which each has a row of four
// elements, R times (5) after a first one, each into a store in memory of its own, or to PLACE/0,
// PLACE/1 and so on: a directory or a URL. So next to nothing is written, and what counts is what
// ranks compute and tell each other, and how often in turn they ask a store. Prints one line of
// JSON, of the first save and the medians of the others: the CPU time of a rank's phase "plan", the
// mean of all ranks, and the time of rank 0's phase "commit" and of the whole save, in seconds; and
// the bytes of `.metadata`. With more ranks than cores the phase "plan" of one rank goes on beside
// "write" of another, so its time on the clock means nothing.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "measure.h"
#include "rank_state.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)

struct Job {
  int ranks = 256;
  int tensors = 2000;
  int rounds = 5;
  std::string place;  // empty: memory
};

// Of this thread.
double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

// What one save took.
struct Times {
  double plan = 0;  // CPU, of all ranks
  double commit = 0;
  double all = 0;
};

class SecondSave {
 public:
  explicit SecondSave(const Job& job) : job_(job) {
    const bench::StateSize size{.bytes = std::int64_t{job.tensors} * job.ranks * 16,
                                .ranks = job.ranks,
                                .tensor_bytes = std::int64_t{job.ranks} * 16};
    for (int rank = 0; rank < job.ranks; ++rank) states_.emplace_back(size, rank);
  }

  void rounds() {
    run_ranks(
        job_.ranks,
        [&](Group& group) {
          for (int round = 0; round <= job_.rounds; ++round) save_once(group);
        },
        std::chrono::minutes(10));
  }

  void print() const {
    const std::vector<Times> again(saves_.begin() + 1, saves_.end());
    const auto median = [&](double Times::*field) {
      std::vector<double> values;
      for (const Times& times : again) values.push_back(times.*field);
      std::ranges::sort(values);
      return values[values.size() / 2];
    };
    const Times& first = saves_.front();
    std::printf(
        "{\"first_plan_cpu_s\": %.6f, \"first_commit_s\": %.4f, \"first_s\": %.4f, "
        "\"plan_cpu_s\": %.6f, \"commit_s\": %.4f, \"save_s\": %.4f, \"metadata_bytes\": %ju}\n",
        first.plan / job_.ranks, first.commit, first.all, median(&Times::plan) / job_.ranks,
        median(&Times::commit), median(&Times::all), metadata_bytes_);
  }

 private:
  void save_once(Group& group) {
    group.barrier();
    if (group.rank() == 0) {
      store_ = job_.place.empty() ? memory_store()
                                  : open_store(job_.place + "/" + std::to_string(saves_.size()));
      saves_.emplace_back();
    }
    group.barrier();
    const double before = cpu_seconds();
    SaveOptions options;
    options.threads = 1;
    options.events = [&](const Event& event) {
      if (event.phase == "plan") add(&Times::plan, cpu_seconds() - before);
      if (event.rank > 0) return;
      const double seconds = static_cast<double>(event.nanoseconds) / 1e9;
      if (event.phase == "commit") add(&Times::commit, seconds);
      if (event.phase == "all") add(&Times::all, seconds);
    };
    save(states_[static_cast<std::size_t>(group.rank())].tree(), store_, options, group);
    group.barrier();
    if (group.rank() == 0) metadata_bytes_ = store_->open(".metadata")->size();
  }

  void add(double Times::*field, double seconds) {
    const std::lock_guard lock(mutex_);
    saves_.back().*field += seconds;
  }

  const Job job_;
  std::vector<bench::RankState> states_;
  std::shared_ptr<Store> store_;
  std::mutex mutex_;  // guards saves_ while ranks save
  std::vector<Times> saves_;
  std::uintmax_t metadata_bytes_ = 0;
};

bool parse(int argc, char** argv, Job& job) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view option = argv[i];
    if (option == "--to") {
      job.place = argv[i + 1];
      continue;
    }
    int* field = option == "--ranks"     ? &job.ranks
                 : option == "--tensors" ? &job.tensors
                 : option == "--rounds"  ? &job.rounds
                                         : nullptr;
    if (field == nullptr) return false;
    *field = std::atoi(argv[i + 1]);
  }
  return argc % 2 == 1 && job.ranks > 0 && job.tensors > 0 && job.rounds > 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Job job;
    if (!parse(argc, argv, job)) {
      std::fprintf(stderr,
                   "usage: bench_second_save --ranks N --tensors T [--rounds R] [--to PLACE]\n");
      return 2;
    }
    SecondSave bench(job);
    bench.rounds();
    bench.print();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_second_save: %s\n", error.what());
    return 3;
  }
}
