#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "tessera/error.h"
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
  for (std::int64_t i = 0; i < kWarmup + options.bench; ++i) {
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
  std::ranges::nth_element(times, times.begin() + times.size() / 2);
  if (mesh.rank() == 0) std::printf("ms/step %.1f\n", times[times.size() / 2]);
}
