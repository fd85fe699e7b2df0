// Ranks that fail in the middle of training: the others have to notice, whatever they are doing.
//   failing_ranks RUNS SEED
// Each run forks two to four ranks that train under a random kind of sharding, over shared memory
// or Gloo. One of them throws, leaves or is killed in the forward or backward of a random unit.
// That rank has to get there, every other one has to end with `peer_failed` or `timeout`, within
// the limit. Prints one line a failure and a summary; exits with 1 when a run went wrong.
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "forked_ranks.h"
#include "fsdp/testing/test_model.h"
#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace {

using tessera::testing::Clock;
constexpr auto kDeadline = std::chrono::seconds(5);  // of a collective
constexpr auto kLimit = std::chrono::seconds(25);    // of a run
constexpr int kNoticed = 3, kFailedAsMeant = 7;
constexpr int kBlocks = 3;

enum class Kind { fsdp2, fsdp1, hybrid, ddp };
enum class Way { throws, leaves, killed };
constexpr std::array kKindNames{"fsdp2", "fsdp1", "hybrid", "ddp"};
constexpr std::array kWayNames{"throws", "leaves", "is killed"};

struct Run {
  int world = 2;
  Kind kind = Kind::fsdp2;
  bool same_host = true;
  int victim = 0;
  Way way = Way::throws;
  bool in_backward = false;
  int unit = 0;
  int step = 0;
  int port = 0;
};

std::string describe(const Run& run) {
  return std::to_string(run.world) + " ranks, " + kKindNames[static_cast<int>(run.kind)] +
         (run.same_host ? ", shared memory" : ", gloo") + ": rank " + std::to_string(run.victim) +
         " " + kWayNames[static_cast<int>(run.way)] + " in the " +
         (run.in_backward ? "backward" : "forward") + " of block" + std::to_string(run.unit) +
         " of step " + std::to_string(run.step);
}

void fail(Way way) {
  if (way == Way::killed) ::raise(SIGKILL);
  if (way == Way::leaves) ::_exit(kFailedAsMeant);
  throw std::runtime_error("bad batch");
}

struct FragileImpl : torch::nn::Module {
  tessera::testing::Block block;
  const Run* run = nullptr;  // set on the victim's unit
  int step = 0;
  FragileImpl() { block = register_module("block", tessera::testing::Block()); }
  torch::Tensor forward(const torch::Tensor& x) {
    const bool now = run != nullptr && step++ == run->step;
    if (now && !run->in_backward) fail(run->way);
    auto y = block(x);
    if (now) y.register_hook([way = run->way](const torch::Tensor&) { fail(way); });
    return y;
  }
};
TESSERA_MODULE(Fragile);

struct ModelImpl : torch::nn::Module {
  std::vector<Fragile> blocks;
  torch::nn::Linear last{nullptr};
  ModelImpl() {
    for (int i = 0; i < kBlocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Fragile()));
    last = register_module("last", torch::nn::Linear(tessera::testing::kWidth, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return last(x);
  }
};
TESSERA_MODULE(Model);

Model build(const Run& run, const tessera::Mesh& mesh) {
  torch::manual_seed(1);
  Model model;
  if (run.kind == Kind::fsdp2) {
    for (auto& block : model->blocks) tessera::fully_shard(block, mesh);
    tessera::fully_shard(model, mesh);
  } else if (run.kind == Kind::hybrid) {
    const auto hybrid = mesh.split(mesh.size() / 2);
    for (auto& block : model->blocks) tessera::fully_shard(block, hybrid);
    tessera::fully_shard(model, hybrid);
  } else if (run.kind == Kind::fsdp1) {
    return tessera::FullyShardedDataParallel<Model>(
               model, mesh, {.auto_wrap_policy = tessera::module_wrap_policy<FragileImpl>()})
        .module();
  } else {
    return tessera::DistributedDataParallel<Model>(model, mesh).module();
  }
  return model;
}

// In the forked process; its exit code.
int train(const Run& run, int rank) {
  try {
    tessera::testing::set_environment(rank, run.world, run.port);
    ::setenv("TESSERA_SAME_HOST", run.same_host ? "1" : "0", 1);
    torch::set_num_threads(1);
    tessera::MeshOptions options;
    options.deadline = kDeadline;
    options.device = torch::kCPU;
    const auto mesh = tessera::Mesh::from_environment(options);
    auto model = build(run, mesh);
    if (rank == run.victim) model->blocks[run.unit]->run = &run;
    torch::optim::SGD optimizer(tessera::local_tensors(tessera::sharded_parameters(model)), 0.01);
    for (int step = 0; step < 50; ++step) {
      model->zero_grad();
      model(torch::ones({2, tessera::testing::kWidth})).square().mean().backward();
      optimizer.step();
    }
    return 0;  // nobody noticed anything
  } catch (const tessera::Error& error) {
    const bool noticed = error.code() == tessera::ErrorCode::peer_failed ||
                         error.code() == tessera::ErrorCode::timeout;
    if (!noticed) std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return noticed ? kNoticed : 1;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (rank == run.victim && text == "bad batch") return kFailedAsMeant;
    std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
    return 1;
  }
}

bool as_meant(const Run& run, int rank, int status) {
  if (rank != run.victim) return WIFEXITED(status) && WEXITSTATUS(status) == kNoticed;
  if (run.way == Way::killed) return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  return WIFEXITED(status) && WEXITSTATUS(status) == kFailedAsMeant;
}

// What went wrong; empty: nothing.
std::string carry_out(const Run& run) {
  auto children =
      tessera::testing::fork_ranks(run.world, [&](int rank) { return train(run, rank); });
  wait_for(children, {.end = Clock::now() + kLimit});
  return end_all(children, [&](int rank, int status) { return as_meant(run, rank, status); });
}

Run draw(const tessera::testing::Below& below) {
  Run run;
  run.world = 2 + below(3);
  run.kind = static_cast<Kind>(below(4));
  if (run.kind == Kind::hybrid) run.world = 4;
  run.same_host = below(2) == 0;
  run.victim = below(run.world);
  run.way = static_cast<Way>(below(3));
  run.in_backward = below(2) == 0;
  run.unit = below(kBlocks);
  run.step = below(4);
  run.port = tessera::testing::free_port();
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: failing_ranks RUNS SEED\n");
    return 2;
  }
  const auto next = [](const tessera::testing::Below& below) -> tessera::testing::Outcome {
    const Run run = draw(below);
    return {describe(run), carry_out(run)};
  };
  const auto seed = static_cast<unsigned>(std::atoi(argv[2]));
  return tessera::testing::repeat(std::atoi(argv[1]), seed, next) == 0 ? 0 : 1;
}
