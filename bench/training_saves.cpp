// What does a save cost a training: by how much do its steps take longer, with the call itself?
// Beside bench/peers/training_saves.py, which has the same model:
//   bench_training_saves --way none|save|thread|process|overlap|process-overlap --dir D
//     [--shape width,layers,batch] [--saves 5] [--command TESSERA] [--threads 1]
// Under torchrun each rank has a part. Prints of each save the milliseconds that its call took,
// what it cost in all, a step beside it by one without, and how many cores were busy in the call.
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "measure.h"
#include "tessera/fsdp.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/training_writer.h"

namespace {

namespace nn = torch::nn;
using tessera::bench::now;

struct Config {
  std::string way = "thread";
  std::string directory;
  std::string command;
  std::vector<std::int64_t> shape{1024, 16, 128};  // width, layers, rows of a batch
  int saves = 5;
  int threads = 1;
  bool idle = true;
};

class Training {
 public:
  Training(const Config& config, const tessera::Mesh& mesh)
      : batch_(torch::randn({config.shape[2], config.shape[0]})) {
    for (std::int64_t i = 0; i < config.shape[1]; ++i) {
      const nn::Linear layer(config.shape[0], config.shape[0]);
      net_->push_back(layer);
      tessera::fully_shard(layer, mesh);
    }
    tessera::fully_shard(net_, mesh);
    optimizer_.emplace(tessera::sharded_parameters(net_));
  }
  // Returns the seconds that it took.
  double step() {
    const double begin = now();
    net_->forward(batch_).square().mean().backward();
    optimizer_->step();
    optimizer_->zero_grad();
    return now() - begin;
  }
  [[nodiscard]] tessera::TrainingState state() { return {net_, *optimizer_}; }

 private:
  nn::Sequential net_;
  std::optional<tessera::AdamW> optimizer_;
  torch::Tensor batch_;
};

// Seconds of all cores that were not idle, since the machine started.
double busy_seconds() {
  std::ifstream text("/proc/stat");
  std::string name;
  std::array<double, 8> ticks{};  // user nice system idle iowait irq softirq steal
  text >> name;
  for (double& one : ticks) text >> one;
  return (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7]) /
         static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

tessera::WriterOptions options_of(const Config& config) {
  tessera::WriterOptions options;
  options.program = config.command;
  options.process = config.way.starts_with("process");
  options.overlap =
      config.way.ends_with("overlap") ? tessera::Overlap::always : tessera::Overlap::never;
  options.idle = config.idle;
  return options;
}

void measure(const Config& config) {
  torch::set_num_threads(config.threads);
  const auto mesh = tessera::Mesh::from_environment({.device = torch::kCPU});
  Training training(config, mesh);
  std::optional<tessera::CheckpointWriter> writer;
  if (config.way != "save" && config.way != "none")
    writer.emplace(mesh.writer_group(), options_of(config));
  const auto steps = [&](int count) {
    std::vector<double> seconds;
    for (int i = 0; i < count; ++i) seconds.push_back(training.step());
    return seconds;
  };
  steps(3);
  tessera::SaveOptions how;
  how.overwrite = true;
  for (int i = -1; i < config.saves; ++i) {  // the first one makes the arena
    const double alone = median(steps(8));
    const auto place = config.directory + "/" + std::to_string(i % 2);
    const double busy_before = busy_seconds();
    const double begin = now();
    std::optional<tessera::PendingSave> pending;
    if (writer) {
      pending = tessera::save(*writer, training.state(), place, how);
    } else if (config.way == "save") {
      tessera::save(training.state(), place, how);
    }
    const double call = now() - begin;
    const double busy = busy_seconds() - busy_before;
    // All ranks take as many steps: until the slowest one's save is decided.
    std::vector<double> beside;
    do {
      beside.push_back(training.step());
    } while (mesh.all_reduce_max(pending && !pending->done() ? 1 : 0) > 0);
    const double all = now() - begin;
    if (pending) pending->result();
    if (mesh.rank() != 0 || i < 0) continue;
    const auto count = static_cast<double>(beside.size());
    std::printf("call %.2f cost %.2f step %.3f steps %zu alone %.2f busy %.2f\n", 1000 * call,
                1000 * (all - count * alone), (all - call) / (count * alone), beside.size(),
                1000 * alone, busy / call);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  CLI::App app;
  app.add_option("--way", config.way);
  app.add_option("--dir", config.directory)->required();
  app.add_option("--command", config.command);
  app.add_option("--shape", config.shape)->delimiter(',')->expected(3);
  app.add_option("--saves", config.saves);
  app.add_option("--threads", config.threads);
  app.add_option("--idle", config.idle);
  CLI11_PARSE(app, argc, argv);
  try {
    measure(config);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
