// What do a save to an object store and a load from it take?
//   bench_stores save|load URL BYTES RANKS
// N ranks (threads of this process) save or load BYTES of float32 tensors of 64 MiB, in memory that
// was touched before. Prints one line of JSON: seconds, CPU seconds of this process, requests,
// bytes read for one that is needed, and the peak of memory, in which the tensors count. A path is
// a URL, too.
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>

#include "measure.h"
#include "rank_state.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int run(const std::string& what, const std::string& url, const bench::StateSize& size) {
  std::vector<bench::RankState> states;
  for (int rank = 0; rank < size.ranks; ++rank) states.emplace_back(size, rank);
  const double begin = bench::now();
  const double cpu = cpu_seconds();
  std::mutex mutex;
  IoReport all;
  run_ranks(
      size.ranks,
      [&](Group& group) {
        Value& tree = states[static_cast<std::size_t>(group.rank())].tree();
        const IoReport own =
            what == "save" ? IoReport(save(tree, url, group)) : IoReport(load(tree, url, group));
        const std::lock_guard lock(mutex);
        all.bytes_read += own.bytes_read;
        all.bytes_needed += own.bytes_needed;
        all.requests += own.requests;
        all.retries += own.retries;
      },
      std::chrono::minutes(10));
  const double seconds = bench::now() - begin;
  std::printf(
      "{\"seconds\": %.4f, \"cpu_s\": %.4f, \"requests\": %llu, \"retries\": %llu, "
      "\"read_per_needed\": %.4f, \"peak_mib\": %ld}\n",
      seconds, cpu_seconds() - cpu, static_cast<unsigned long long>(all.requests),
      static_cast<unsigned long long>(all.retries),
      all.bytes_needed == 0
          ? 0.0
          : static_cast<double>(all.bytes_read) / static_cast<double>(all.bytes_needed),
      bench::peak_memory());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 5 ? argv[1] : "";
  if (what != "save" && what != "load") {
    std::fprintf(stderr, "usage: bench_stores save|load URL BYTES RANKS\n");
    return 2;
  }
  try {
    return run(what, argv[2], {.bytes = std::atoll(argv[3]), .ranks = std::atoi(argv[4])});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_stores: %s\n", error.what());
    return 3;
  }
}
