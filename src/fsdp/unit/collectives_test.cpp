// How often a step communicates (spec T6), counted where it leaves the runtime, and how much memory
// it takes.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "fsdp/testing/counting_transport.h"
#include "fsdp/testing/test_training.h"
#include "tessera/ddp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch_of;
using testing::Counts;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

constexpr int kBlocks = 3;
constexpr int kUnits = kBlocks + 1;

void step(Net& net, const Mesh& mesh, int micros = 1) {
  for (int micro = 0; micro < micros; ++micro) {
    std::optional<NoSync> quiet;
    if (micro + 1 < micros) quiet.emplace(net);
    loss_of(net, batch_of(0, micro, mesh)).backward();
  }
  net->zero_grad();
}

void evaluate(Net& net, const Mesh& mesh) {
  const torch::NoGradGuard no_grad;
  loss_of(net, batch_of(0, 0, mesh));
}

// What one call of `work` costs, after a first step.
template <typename Work>
Counts cost(Counts& counts, Work&& work) {
  counts = {};
  work();
  return counts;
}

TEST(Collectives, OfFullyShardedUnits_T6) {
  for (const bool keeps : {false, true}) {
    Counts counts[2];
    run_mesh(2, [&](Mesh& mesh) {
      auto& mine = counts[mesh.rank()];
      auto net = make_net({.blocks = kBlocks});
      count(mesh, mine);
      ShardOptions options;
      if (keeps) options.reshard_after_forward = false;  // SHARD_GRAD_OP
      for (auto& block : net->blocks) fully_shard(block, mesh, options);
      fully_shard(net, mesh, options);
      const int a_pass = keeps ? kUnits : 2 * kBlocks + 1;
      // The ranks compare the order of their first pass.
      EXPECT_EQ(cost(mine, [&] { step(net, mesh); }),
                (Counts{.gathers = a_pass, .reductions = kUnits, .messages = kUnits}));
      EXPECT_EQ(cost(mine, [&] { step(net, mesh); }),
                (Counts{.gathers = a_pass, .reductions = kUnits}));
      // Between micro-batches what stays gathered after forward stays so after backward too (NS3).
      EXPECT_EQ(cost(mine, [&] { step(net, mesh, 3); }),
                (Counts{.gathers = keeps ? kUnits : 3 * a_pass, .reductions = kUnits}));
      EXPECT_EQ(cost(mine, [&] { evaluate(net, mesh); }), (Counts{.gathers = kUnits}));
    });
  }
}

TEST(Collectives, OfCopies_T6) {
  Counts shard[4], replicate[4];
  run_mesh(4, [&](Mesh& mesh) {
    auto& over_shards = shard[mesh.rank()];
    auto& over_copies = replicate[mesh.rank()];
    auto net = make_net({.blocks = kBlocks});
    const auto hybrid = mesh.split(2);
    count(hybrid.shard, over_shards);
    count(hybrid.replicate, over_copies);
    for (auto& block : net->blocks) fully_shard(block, hybrid);
    fully_shard(net, hybrid);
    step(net, mesh);
    over_shards = over_copies = {};
    step(net, mesh);
    EXPECT_EQ(over_shards, (Counts{.gathers = 2 * kBlocks + 1, .reductions = kUnits}));
    EXPECT_EQ(over_copies, Counts{.sums = kUnits});
  });
}

TEST(Collectives, OfDataParallel_T6) {
  Counts counts[2];
  run_mesh(2, [&](Mesh& mesh) {
    auto& mine = counts[mesh.rank()];
    count(mesh, mine);
    auto units = make_net({.blocks = kBlocks});
    for (auto& block : units->blocks) replicate(block, mesh);
    replicate(units, mesh);
    step(units, mesh);
    EXPECT_EQ(cost(mine, [&] { step(units, mesh); }), Counts{.sums = kUnits});
    EXPECT_EQ(cost(mine, [&] { step(units, mesh, 3); }), Counts{.sums = kUnits});
    auto one = make_net({.blocks = kBlocks});
    replicate(one, mesh);
    step(one, mesh);
    EXPECT_EQ(cost(mine, [&] { step(one, mesh); }), Counts{.sums = 1});  // one bucket holds all
    EXPECT_EQ(cost(mine, [&] { evaluate(one, mesh); }), Counts{});
  });
}

// Memory ------------------------------------------------------------------------------------------

// Counts what a thread has allocated, whoever frees it, while it is libtorch's allocator.
class CountingAllocator final : public c10::Allocator {
 public:
  struct Tally {
    std::atomic<std::int64_t> live{0};
    std::atomic<std::int64_t> peak{0};
  };
  // The tally of this thread's allocations; null: they are not counted.
  static thread_local Tally* current;

  CountingAllocator() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~CountingAllocator() override { c10::SetCPUAllocator(before_, kPriority); }

  c10::DataPtr allocate(std::size_t bytes) override {
    auto* tally = current;
    auto* block = static_cast<Block*>(std::aligned_alloc(kHeader, (bytes / kHeader + 2) * kHeader));
    *block = {static_cast<std::int64_t>(bytes), tally};
    if (tally != nullptr) {
      const auto live = tally->live += block->bytes;
      auto peak = tally->peak.load();
      while (peak < live && !tally->peak.compare_exchange_weak(peak, live)) {
      }
    }
    // Some operators of libtorch want the context to be the memory itself.
    auto* memory = reinterpret_cast<std::byte*>(block) + kHeader;
    return {memory, memory, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static constexpr std::size_t kHeader = 64;  // before the memory, which stays aligned
  static constexpr std::uint8_t kPriority = 100;
  struct Block {
    std::int64_t bytes;
    Tally* tally;
  };
  static void release(void* memory) {
    auto* block = reinterpret_cast<Block*>(static_cast<std::byte*>(memory) - kHeader);
    if (block->tally != nullptr) block->tally->live -= block->bytes;
    std::free(block);
  }
  c10::Allocator* before_;
};
thread_local CountingAllocator::Tally* CountingAllocator::current = nullptr;

struct WideImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  explicit WideImpl(std::int64_t width) {
    linear = register_module("linear",
                             torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(linear(x)); }
};
TESSERA_MODULE(Wide);

struct WideStackImpl : torch::nn::Module {
  std::vector<Wide> blocks;
  torch::nn::Linear last{nullptr};
  WideStackImpl(int count, std::int64_t width) {
    for (int i = 0; i < count; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Wide(width)));
    last = register_module("last", torch::nn::Linear(width, width / 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return last(x);
  }
};
TESSERA_MODULE(WideStack);

// Shards of parameters and gradients, the root's parameters, two gathered units, two unit-sized
// buffers of gradients or reductions, activations: whatever the number of units.
TEST(Memory, OfAStepIsBoundedByTwoUnits) {
  constexpr std::int64_t kWidth = 256;
  constexpr int kWide = 12;
  constexpr std::int64_t kUnit = kWidth * kWidth * 4;
  constexpr std::int64_t kRoot = (kWidth + 1) * kWidth / 2 * 4;
  constexpr std::int64_t kRows = 4;
  // What is allocated here is freed by its own function, also after the allocator is gone.
  static CountingAllocator::Tally tallies[2];
  const CountingAllocator allocator;
  run_mesh(2, [&](Mesh& mesh) {
    WideStack model(kWide, kWidth);
    for (auto& block : model->blocks) fully_shard(block, mesh);
    fully_shard(model, mesh);
    auto& tally = tallies[mesh.rank()];
    CountingAllocator::current = &tally;
    const auto step = [&] { model(torch::ones({kRows, kWidth})).sum().backward(); };
    step();
    const auto shards =
        (kWide * kUnit + kRoot) / 2;  // of gradients; those of parameters were there
    const auto activations = (kWide + 2) * 3 * kRows * kWidth * 4;
    // libtorch's Gloo sums up in a copy of what it is given, and its thread frees the copy of the
    // reduction before when it gets to it.
    const bool is_gloo = mesh.process_group()->getDefaultBackend()->getBackendName() == "gloo";
    const auto bound =
        shards + kRoot + 2 * kUnit + 2 * kUnit + activations + (is_gloo ? 2 * kUnit : 0);
    EXPECT_LE(tally.peak, bound) << "rank " << mesh.rank();
    EXPECT_GT(tally.peak, shards + kUnit);  // it counts
    model->zero_grad();
    tally.peak = tally.live.load();
    step();
    EXPECT_LE(tally.peak, bound) << "second step, rank " << mesh.rank();
    CountingAllocator::current = nullptr;
  });
}

// Besides the state itself: the shards of a unit as they came, and the unit made of them.
TEST(Memory, OfAFullStateIsOneUnitBesideIt_SD2) {
  constexpr std::int64_t kWidth = 256;
  constexpr int kWide = 12;
  constexpr std::int64_t kUnit = kWidth * kWidth * 4;
  static CountingAllocator::Tally tallies[2];
  const CountingAllocator allocator;
  for (const bool is_sharded_kind : {false, true}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto model = FullyShardedDataParallel<WideStack>(
          WideStack(kWide, kWidth), mesh, {.auto_wrap_policy = module_wrap_policy<WideImpl>()});
      set_state_dict_type(model.module(),
                          {.type = is_sharded_kind ? StateDictType::sharded : StateDictType::full});
      auto& tally = tallies[mesh.rank()];
      CountingAllocator::current = &tally;
      const auto before = tally.live.load();
      tally.peak = before;
      {
        const auto state = state_dict(model.module());
        const auto whole = kWide * kUnit + (kWidth + 1) * kWidth / 2 * 4;
        const auto held = is_sharded_kind ? whole / 2 : whole;
        const bool is_gloo = mesh.process_group()->getDefaultBackend()->getBackendName() == "gloo";
        EXPECT_LE(tally.peak - before, held + (is_gloo ? 4 : 3) * kUnit);
        EXPECT_GE(tally.peak - before, held);
      }
      CountingAllocator::current = nullptr;
    });
  }
}

}  // namespace
}  // namespace tessera
