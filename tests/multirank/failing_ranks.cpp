// Ranks that fail in the middle of training: the others have to notice, whatever they are doing.
//   failing_ranks RUNS SEED
// Each run forks two to four ranks that train under a random kind of sharding, over shared memory
// or Gloo. One of them throws, leaves or is killed in the forward or backward of a random unit.
// That rank has to get there, every other one has to end with `peer_failed` or `timeout`, within
// the limit. Prints one line a failure and a summary; exits with 1 when a run went wrong.
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
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

#include "fsdp/testing/test_model.h"
#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace {

using Clock = std::chrono::steady_clock;
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
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", std::to_string(run.world).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", std::to_string(run.port).c_str(), 1);
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

std::optional<int> wait_until(pid_t child, Clock::time_point end) {
  while (Clock::now() < end) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return std::nullopt;
}

bool as_meant(const Run& run, int rank, int status) {
  if (rank != run.victim) return WIFEXITED(status) && WEXITSTATUS(status) == kNoticed;
  if (run.way == Way::killed) return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  return WIFEXITED(status) && WEXITSTATUS(status) == kFailedAsMeant;
}

// What went wrong; empty: nothing.
std::string carry_out(const Run& run) {
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < run.world; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      const int code = train(run, rank);
      ::_exit(code);
    }
    ranks.push_back(child);
  }
  std::string wrong;
  const auto end = Clock::now() + kLimit;
  for (int rank = 0; rank < run.world; ++rank) {
    const auto status = wait_until(ranks[rank], end);
    if (!status) {
      wrong += " rank " + std::to_string(rank) + " hangs;";
      ::kill(ranks[rank], SIGKILL);
      ::waitpid(ranks[rank], nullptr, 0);
    } else if (!as_meant(run, rank, *status)) {
      wrong +=
          " rank " + std::to_string(rank) + " ended with status " + std::to_string(*status) + ";";
    }
  }
  return wrong;
}

// The system's choice: a port of ours could still be that of a connection that closed a minute ago.
int free_port() {
  const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (probe < 0 || ::bind(probe, any, size) != 0 || ::getsockname(probe, any, &size) != 0) {
    std::perror("failing_ranks: no port");
    std::exit(2);
  }
  ::close(probe);
  return ntohs(address.sin_port);
}

Run draw(std::mt19937& random) {
  const auto below = [&](int count) {
    return static_cast<int>(std::uniform_int_distribution<>(0, count - 1)(random));
  };
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
  run.port = free_port();
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: failing_ranks RUNS SEED\n");
    return 2;
  }
  const int runs = std::atoi(argv[1]);
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[2])));
  int wrong = 0;
  double longest = 0;
  for (int i = 0; i < runs; ++i) {
    const Run run = draw(random);
    const auto begin = Clock::now();
    const auto text = carry_out(run);
    longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
    if (text.empty()) continue;
    ++wrong;
    std::printf("%s:%s\n", describe(run).c_str(), text.c_str());
    std::fflush(stdout);
  }
  std::printf("%d runs, %d wrong, the longest took %.1f s\n", runs, wrong, longest);
  return wrong == 0 ? 0 : 1;
}
