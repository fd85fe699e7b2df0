// Four ranks save a model in training as `full` and restore it into a new one, each in less memory
// than the model has: full_by_ranks through libtorch.
//   full_by_fsdp DIRECTORY
// Each rank is a process that may have, beside what it has when libtorch and the group of ranks are
// up, its shards and 128 MiB more (RLIMIT_DATA): less than the parameters alone. FSDP shards them;
// most are frozen, the rest have moments of AdamW. Prints what the ranks took at most; exits with 1
// if one failed.
#include <malloc.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "limit.h"
#include "multirank/forked_ranks.h"
#include "tessera/checkpointer.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;

constexpr int kRanks = 4;
constexpr int kBlocks = 12;
constexpr int kTrained = 1;
constexpr std::int64_t kWidth = 2048;  // a block has 16 MiB
constexpr std::uint64_t kBlock = std::uint64_t{kWidth} * kWidth * 4;
constexpr std::uint64_t kParameters = kBlocks * kBlock;
constexpr std::uint64_t kShards = (kBlocks + 2 * kTrained) * kBlock / kRanks;  // with moments
constexpr std::uint64_t kMore = std::uint64_t{128} << 20;
static_assert(kShards + kMore < kParameters);

struct BlockImpl : torch::nn::Module {
  torch::Tensor weight;
  explicit BlockImpl(double scale) {
    const auto numbers = torch::arange(kWidth, torch::kFloat) * scale;
    weight = register_parameter("weight", numbers.unsqueeze(1) - numbers / 2);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::mm(x, weight); }
};
TESSERA_MODULE(Block);

struct NetImpl : torch::nn::Module {
  std::vector<Block> blocks;
  explicit NetImpl(double scale) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(scale * (i + 1))));
      blocks.back()->weight.requires_grad_(i >= kBlocks - kTrained);
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
};
TESSERA_MODULE(Net);

double mib(std::uint64_t kib) {
  return static_cast<double>(kib) / 1024;
}

// The whole model does not fit.
void require_limit() {
  const std::unique_ptr<void, decltype(&std::free)> whole(std::malloc(kParameters), &std::free);
  if (whole) throw Error(ErrorCode::limit, "the limit has no effect");
}

// A model and its optimizer.
struct Training {
  Net model{nullptr};
  std::optional<FullyShardedDataParallel<Net>> fsdp;
  std::optional<AdamW> optimizer;

  Training(const Mesh& mesh, double scale) {
    model = deferred_init([&] { return Net(scale); });
    FullyShardedOptions options;
    options.auto_wrap_policy = module_wrap_policy<BlockImpl>();
    options.use_orig_params = true;
    fsdp.emplace(model, mesh, options);
    std::vector<ShardedParameter> trained;
    for (auto& parameter : fsdp->parameters())
      if (parameter.local.requires_grad()) trained.push_back(std::move(parameter));
    optimizer.emplace(std::move(trained));
  }

  void step() {
    (*fsdp)(torch::randn({4, kWidth})).square().sum().backward();
    optimizer->step();
    optimizer->zero_grad();
  }

  // The sum of all that this rank holds.
  [[nodiscard]] double sum() const {
    const torch::NoGradGuard no_grad;
    double all = 0;
    for (auto& parameter : fsdp->parameters()) all += parameter.local.abs().sum().item<double>();
    return all;
  }
};

double save_one(const Mesh& mesh, Checkpointer& checkpointer, const std::string& path) {
  Training training(mesh, 1e-6);
  training.step();
  checkpointer.save_checkpoint(path, training.model, *training.optimizer,
                               Value::dict({{"global_step", 1}}));
  return training.sum();
}

// A restore compares digests of all tensors with those that were saved.
double restore_one(const Mesh& mesh, Checkpointer& checkpointer, const std::string& path) {
  Training training(mesh, 2e-6);
  (void)checkpointer.restore_checkpoint(path, training.model, *training.optimizer);
  return training.sum();
}

int take_part(const std::string& directory, int rank, int port) {
  testing::set_environment(rank, kRanks, port);
  try {
    at::set_num_threads(1);
    MeshOptions options;
    options.device = torch::kCPU;
    const Mesh mesh = Mesh::from_environment(options);
    Checkpointer checkpointer(CheckpointerKind::full, mesh.checkpoint_group());
    const std::uint64_t rest = testing::status_kib("VmHWM"), own = testing::status_kib("RssAnon");
    testing::limit_memory(kShards + kMore);
    const double saved = save_one(mesh, checkpointer, directory + "/step1");
    const std::uint64_t after_save = testing::status_kib("VmHWM");
    const double restored = restore_one(mesh, checkpointer, directory + "/step1");
    if (saved != restored) throw Error(ErrorCode::corrupt, "another model");
    require_limit();
    std::printf(
        "rank %d: at rest %.0f MiB, %.0f of them its own; at most %.0f while it saved, %.0f in "
        "all. "
        "Its shards have %.0f, the parameters %.0f\n",
        rank, mib(rest), mib(own), mib(after_save), mib(testing::status_kib("VmHWM")),
        mib(kShards >> 10), mib(kParameters >> 10));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::printf("rank %d: %s\n", rank, text.substr(0, text.find('\n')).c_str());
    std::fflush(stdout);
    return 1;
  }
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  // Blocks of more than 1 MiB go back to the system when they are freed. glibc raises that size by
  // default to that of the blocks it sees, 16 MiB here. It gives back the memory of freed ones
  // then, but keeps their addresses, which RLIMIT_DATA counts: 800 MiB of them when the model is
  // made.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  const std::string directory = argv[1];
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  const int port = testing::free_port();
  auto children =
      testing::fork_ranks(kRanks, [&](int rank) { return take_part(directory, rank, port); });
  testing::wait_for(children, {.end = testing::Clock::now() + std::chrono::seconds(200)});
  const std::string wrong = testing::end_all(children, [](int, int status) { return status == 0; });
  std::filesystem::remove_all(directory);
  if (!wrong.empty()) std::printf("%s\n", wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
