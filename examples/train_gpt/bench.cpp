#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/trace.h"
#include "training.h"

namespace {

constexpr int kWarmup = 3;

void require(bool holds, const std::string& what) {
  if (!holds) throw tessera::Error(tessera::ErrorCode::mismatch, what);
}

// Between forward and backward a rank holds whole the root's parameters only.
void require_freed(const Gpt& model) {
  for (const tessera::UnitReport& unit : tessera::unit_reports(model)) {
    const bool is_root = unit.name.empty();
    require(is_root == (unit.gathered_bytes > 0), "after forward unit '" + unit.name + "' has " +
                                                      std::to_string(unit.gathered_bytes) +
                                                      " bytes of gathered parameters");
  }
}

}  // namespace

void run_bench(const Options& options, const tessera::Mesh& mesh) {
  Training training(options, mesh);
  const std::int64_t batch = std::max<std::int64_t>(1, options.batch / mesh.size());
  const auto windows =
      torch::randint(kVocabulary, {batch, options.seq + 1}, torch::kLong).to(mesh.device());
  std::vector<double> times;
  std::clock_t computed = 0;  // by all threads of this process
  for (std::int64_t i = 0; i < kWarmup + options.bench; ++i) {
    if (i == kWarmup) computed = std::clock();
    const auto start = std::chrono::steady_clock::now();
    const auto loss = training.loss_sum(windows) / static_cast<double>(batch * options.seq);
    if (i == 0 && training.is_sharded()) require_freed(training.model());
    loss.backward();
    training.optimizer().step();
    training.optimizer().zero_grad();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    if (i >= kWarmup) times.push_back(taken.count());
  }
  const double cpu = 1000.0 * static_cast<double>(std::clock() - computed) / CLOCKS_PER_SEC /
                     static_cast<double>(times.size());
  std::ranges::nth_element(times, times.begin() + times.size() / 2);
  if (mesh.rank() == 0)
    std::printf("ms/step %.2f\ncpu ms/step %.2f\n", times[times.size() / 2], cpu);
}
