// ShardLayout::flat: units whose parameters lie end to end train as those that are cut by rows, bit
// for bit, and follow the same rules.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/counting_transport.h"
#include "fsdp/testing/test_training.h"
#include "fsdp/unit/registry.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/error.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "tessera/optimizer_in_backward.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

constexpr int kRounds = 4;

// Parameters of three dimensions, of one element, without any, frozen and unused.
struct OddImpl : nn::Module {
  torch::Tensor cube, one, none, frozen, unused;
  nn::Linear out{nullptr};
  OddImpl() {
    cube = register_parameter("cube", torch::zeros({5, 3, 2}));
    one = register_parameter("one", torch::zeros({1, 1}));
    none = register_parameter("none", torch::zeros({0, 2}));
    frozen = register_parameter("frozen", torch::zeros({6, 3}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::zeros({7, 2}));
    out = register_module("out", nn::Linear(10, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto mixed = x.matmul(frozen).matmul(cube.flatten(1).matmul(frozen).t());
    return out(torch::tanh(torch::cat({mixed, mixed * one}, 1))) + none.sum();
  }
};
TESSERA_MODULE(Odd);

struct PairImpl : nn::Module {
  Odd first{nullptr}, second{nullptr};
  torch::Tensor scale;
  PairImpl() {
    scale = register_parameter("scale", torch::zeros({3}));
    first = register_module("first", Odd());
    second = register_module("second", Odd());
  }
  // `all`: both parts are used.
  torch::Tensor forward(const torch::Tensor& x, bool all, bool again) {
    auto y = again ? activation_checkpoint(first, x) : first(x);
    return scale * (all ? second(torch::cat({y, y}, 1)) : y);
  }
};
TESSERA_MODULE(Pair);

Pair make_pair() {
  Pair pair;
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  for (auto& parameter : pair->parameters()) parameter.uniform_(-0.7, 0.7, generator);
  return pair;
}

// One way to train, with both layouts.
struct Setting {
  std::string name;
  std::vector<int> worlds;
  std::function<void(ShardOptions&)> set = [](ShardOptions&) {};
  bool is_hybrid = false;
  int micros = 1;
  bool is_quiet = false;  // without sync but for the last micro-batch
  bool is_checkpointed = false;
  bool uses_some = false;  // odd rounds leave the second part out
  std::function<void(Pair&, int round, int micro)> before = [](Pair&, int, int) {};

  friend void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }
};

struct Trained {
  std::vector<float> losses;
  std::vector<FullState> states;     // after each round
  std::vector<FullState> gradients;  // before its step
};

FullState whole_gradients(Pair& pair) {
  const FullParams whole(pair, {.writeback = false, .with_grads = true});
  FullState state;
  for (const auto& entry : pair->named_parameters()) {
    if (entry.value().grad().defined()) state.insert(entry.key(), entry.value().grad().clone());
  }
  return state;
}

void shard_pair(Pair& pair, const Mesh& mesh, const ShardOptions& options, bool is_hybrid) {
  const auto apply = [&](auto& module) {
    if (is_hybrid) {
      fully_shard(module, mesh.split(mesh.size() / 2), options);
    } else {
      fully_shard(module, mesh, options);
    }
  };
  apply(pair->first);
  apply(pair->second);
  apply(pair);
}

Trained train_pair(const Mesh& mesh, const Setting& setting, ShardLayout layout) {
  auto pair = make_pair();
  ShardOptions options{.layout = layout};
  setting.set(options);
  shard_pair(pair, mesh, options, setting.is_hybrid);
  // The same arithmetic for every element, which libtorch's fused AdamW has not: it rounds the last
  // few of a tensor otherwise.
  torch::optim::AdamW optimizer(local_tensors(sharded_parameters(pair)),
                                torch::optim::AdamWOptions(0.01));
  Trained trained;
  for (int round = 0; round < kRounds; ++round) {
    pair->zero_grad();
    optimizer.zero_grad();
    for (int micro = 0; micro < setting.micros; ++micro) {
      std::optional<NoSync> quiet;
      if (setting.is_quiet && micro + 1 < setting.micros) quiet.emplace(pair);
      setting.before(pair, round, micro);
      auto generator =
          at::make_generator<at::CPUGeneratorImpl>(100 * round + 10 * micro + mesh.rank());
      const auto x = torch::rand({3, 6}, generator);
      const bool all = !setting.uses_some || round % 2 == 0;
      auto loss = pair(x, all, setting.is_checkpointed).square().mean();
      loss.backward();
      trained.losses.push_back(loss.item<float>());
    }
    trained.gradients.push_back(whole_gradients(pair));
    optimizer.step();
    trained.states.push_back(full_state_dict(pair));
  }
  return trained;
}

void expect_same_state(const FullState& rows, const FullState& flat, const std::string& what) {
  ASSERT_EQ(rows.size(), flat.size()) << what;
  for (const auto& entry : rows)
    EXPECT_TRUE(testing::equal(entry.value(), flat[entry.key()])) << what << " " << entry.key();
}

class FlatLayout : public ::testing::TestWithParam<Setting> {};

TEST_P(FlatLayout, TrainsAsRowsBitForBit) {
  const auto& setting = GetParam();
  for (const int world : setting.worlds) {
    run_mesh(world, [&](Mesh& mesh) {
      const auto rows = train_pair(mesh, setting, ShardLayout::rows);
      const auto flat = train_pair(mesh, setting, ShardLayout::flat);
      EXPECT_EQ(rows.losses, flat.losses) << world;
      for (int round = 0; round < kRounds; ++round) {
        const auto what = std::to_string(world) + " ranks, round " + std::to_string(round);
        expect_same_state(rows.gradients[round], flat.gradients[round], what + ", gradient");
        expect_same_state(rows.states[round], flat.states[round], what);
      }
    });
  }
}

void freeze(Pair& pair, bool is_frozen) {
  for (auto& parameter : pair->first->out->parameters()) parameter.set_requires_grad(!is_frozen);
}

std::vector<Setting> settings() {
  return {
      {.name = "Plain", .worlds = {1, 2, 3, 4}},
      {.name = "Gathered",
       .worlds = {2, 3},
       .set = [](auto& options) { options.reshard_after_forward = false; }},
      {.name = "Parked",
       .worlds = {4},
       .set = [](auto& options) { options.reshard_after_forward_ranks = 2; }},
      {.name = "Offloaded",
       .worlds = {2},
       .set = [](auto& options) { options.offload_to_cpu = true; }},
      {.name = "NoSync", .worlds = {1, 2, 3}, .micros = 3, .is_quiet = true},
      {.name = "Synced", .worlds = {2, 3}, .micros = 2},
      {.name = "Mixed",
       .worlds = {1, 3},
       .set =
           [](auto& options) {
             options.mixed_precision = {.param_dtype = torch::kBFloat16,
                                        .reduce_dtype = torch::kFloat};
           },
       .micros = 2,
       .is_quiet = true},
      {.name = "Low",
       .worlds = {2},
       .set =
           [](auto& options) {
             options.mixed_precision = {.param_dtype = torch::kBFloat16,
                                        .keep_low_precision_grads = true};
           }},
      {.name = "Hybrid", .worlds = {2, 4}, .is_hybrid = true, .micros = 2, .is_quiet = true},
      {.name = "HybridWaits",
       .worlds = {4},
       .is_hybrid = true,
       .micros = 2,
       .before = [](Pair& pair, int, int micro) { set_requires_all_reduce(pair, micro == 1); }},
      {.name = "Factor",
       .worlds = {3},
       .set = [](auto& options) { options.gradient_divide_factor = 5.0; }},
      {.name = "Checkpointed", .worlds = {2}, .is_checkpointed = true},
      {.name = "SomeUnits", .worlds = {2, 3}, .micros = 2, .is_quiet = true, .uses_some = true},
      // Frozen between a backward that keeps its gradients and the one that reduces them: FSDP2
      // reduces what was kept.
      {.name = "FrozenMeanwhile",
       .worlds = {2, 3},
       .micros = 2,
       .is_quiet = true,
       .before = [](Pair& pair, int round, int micro) { freeze(pair, round > 0 && micro == 1); }},
      // FSDP2's zero_grad leaves what NoSync keeps.
      {.name = "ZeroedMeanwhile",
       .worlds = {2},
       .micros = 2,
       .is_quiet = true,
       .before = [](Pair& pair, int, int) { pair->zero_grad(); }},
      {.name = "Thawed",
       .worlds = {3},
       .before = [](Pair& pair, int round,
                    int) { pair->second->frozen.set_requires_grad(round > 1); }},
      {.name = "Hooked",
       .worlds = {2},
       .before =
           [](Pair& pair, int round, int) {
             set_all_reduce_hook(pair, [round](torch::Tensor& sum) { sum.mul_(1 + round); });
           }},
  };
}

INSTANTIATE_TEST_SUITE_P(All, FlatLayout, ::testing::ValuesIn(settings()),
                         [](const auto& of) { return of.param.name; });

// As one process trains on all ranks' batches.
TEST(FlatUnits, TrainAsOneProcess) {
  for (const int world : {1, 2, 3}) {
    const auto expected = testing::reference(world, 1, /*tied=*/true);
    run_mesh(world, [&](Mesh& mesh) {
      auto net = make_net({.tied = true});
      for (auto& block : net->blocks) fully_shard(block, mesh, {.layout = ShardLayout::flat});
      fully_shard(net, mesh, {.layout = ShardLayout::flat});
      const auto parameters = sharded_parameters(net);
      torch::optim::SGD optimizer(local_tensors(parameters), testing::sgd_options());
      for (int step = 0; step < testing::kSteps; ++step) {
        optimizer.zero_grad();
        auto loss = loss_of(net, batch_of(step, 0, mesh));
        loss.backward();
        ASSERT_NEAR(mesh.all_reduce_sum(loss.item<double>()) / world, expected.losses[step],
                    2e-6 * expected.losses[step]);
        ASSERT_NEAR(clip_grad_norm(parameters, 1.0), expected.norms[step], 2e-6);
        optimizer.step();
      }
      const auto state = full_state_dict(net);
      for (const auto& [name, whole] : expected.parameters)
        EXPECT_TRUE(testing::allclose(state[name], whole, 1e-5, 1e-6)) << name;
      for (const auto& [name, norm] : norms_by_name(parameters, NormOf::parameters)) {
        const auto whole = expected.parameters.at(name).norm().item<double>();
        EXPECT_NEAR(norm, whole, 2e-5 * whole + 1e-6) << name;
      }
    });
  }
}

TEST(FlatUnits, AreDescribedByTheElementsThatARankHolds) {
  run_mesh(3, [](Mesh& mesh) {
    auto pair = make_pair();
    const auto whole = full_state_dict(pair);
    shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    std::map<std::string, std::int64_t> held;
    for (const auto& parameter : sharded_parameters(pair)) {
      const auto local = parameter.local.detach();
      ASSERT_TRUE(parameter.flat && parameter.sharded) << parameter.name();
      ASSERT_EQ(local.dim(), 1) << parameter.name();
      const auto& all = whole[parameter.name()];
      EXPECT_EQ(parameter.shape, all.sizes().vec());
      EXPECT_TRUE(testing::equal(local, all.flatten().narrow(0, parameter.offset, local.numel())))
          << parameter.name();
      EXPECT_TRUE(parameter.members.empty());
      if (local.numel() > 0) {
        EXPECT_EQ(std::bit_cast<std::uintptr_t>(local.const_data_ptr()) % 16, 0u);
      }
      held[parameter.name()] = local.numel();
    }
    // One element is one rank's.
    EXPECT_EQ(mesh.all_reduce_sum(static_cast<double>(held.at("first.one"))), 1);
    // At most three boxes of a matrix, five of three dimensions.
    const auto state = model_state(pair);
    for (const auto& [name, value] : state.pairs()) {
      const auto& leaf = value.as_tensor();
      const auto most = 2 * static_cast<std::int64_t>(leaf.shape.size()) - 1;
      EXPECT_LE(static_cast<std::int64_t>(leaf.pieces.size()), most) << name.as_string();
      EXPECT_EQ(leaf.shape, whole[name.as_string()].sizes().vec());
    }
  });
}

// Parameters begin where an allocator would put them, on every rank: kernels take the same paths.
TEST(FlatUnits, BeginParametersAtMultiplesOf64Bytes) {
  run_mesh(2, [](Mesh& mesh) {
    auto pair = make_pair();
    shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    const FullParams whole(pair);
    const auto base = std::bit_cast<std::uintptr_t>(pair->first->cube.const_data_ptr());
    for (const auto& parameter : pair->first->parameters()) {
      if (parameter.numel() == 0) continue;
      EXPECT_EQ((std::bit_cast<std::uintptr_t>(parameter.const_data_ptr()) - base) % 64, 0u);
    }
  });
}

// What fills the gaps is zero on every rank, before and after training, so it adds nothing to sums
// over shards.
TEST(FlatUnits, KeepZerosBetweenParameters) {
  run_mesh(3, [](Mesh& mesh) {
    auto pair = make_pair();
    shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    AdamW optimizer(sharded_parameters(pair), {.lr = 0.1});
    pair(torch::ones({2, 6}), true, false).square().mean().backward();
    optimizer.step();
    const auto unit = detail::find_unit(&*pair->first);
    auto rest = unit->shard().clone();
    for (std::size_t i = 0; i < unit->params().size(); ++i) {
      const auto held = unit->held(i);
      rest.narrow(0, held.storage_offset(), held.numel()).zero_();
    }
    EXPECT_EQ(rest.abs().sum().item<float>(), 0);
  });
}

TEST(FlatUnits, ShowWholeParametersAndKeepChanges) {
  run_mesh(3, [](Mesh& mesh) {
    auto pair = make_pair();
    shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    {
      const FullParams whole(pair);
      const torch::NoGradGuard no_grad;
      pair->first->cube.copy_(torch::arange(30).view({5, 3, 2}));
      pair->second->one.fill_(9);
    }
    auto state = full_state_dict(pair);
    EXPECT_TRUE(
        testing::equal(state["first.cube"], torch::arange(30, torch::kFloat).view({5, 3, 2})));
    EXPECT_EQ(state["second.one"].item<float>(), 9);
    for (auto& entry : state) entry.value().add_(1);
    load_full_state_dict(pair, state);
    expect_same_state(state, full_state_dict(pair), "loaded");
  });
}

TEST(FlatUnits, AdoptReplacedTensors) {
  run_mesh(2, [](Mesh& mesh) {
    auto pair = make_pair();
    shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    pair->first->cube.set_data(torch::full({5, 3, 2}, 4.0F, mesh.device()));
    auto parameters = sharded_parameters(pair);
    for (const auto& parameter : parameters) {
      if (parameter.name() == "first.cube") {
        EXPECT_TRUE(testing::equal(parameter.local.detach(), torch::full_like(parameter.local, 4)));
      }
      if (parameter.name() == "first.out.weight")
        parameter.local.set_data(torch::full_like(parameter.local.detach(), 5));
    }
    const auto state = full_state_dict(pair);
    EXPECT_TRUE(testing::equal(state["first.cube"], torch::full({5, 3, 2}, 4.0F)));
    EXPECT_TRUE(testing::equal(state["first.out.weight"], torch::full({3, 10}, 5.0F)));
  });
}

// The sharded kind is PyTorch's chunks of rows, whatever a rank holds.
TEST(FlatUnits, HaveTheShardedStateOfRows) {
  run_mesh(3, [](Mesh& mesh) {
    auto flat = make_pair(), rows = make_pair();
    shard_pair(flat, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    shard_pair(rows, mesh, {}, /*is_hybrid=*/false);
    const StateDictTypeScope of_flat(flat, {.type = StateDictType::sharded});
    const auto state = state_dict(flat);
    const StateDictTypeScope of_rows(rows, {.type = StateDictType::sharded});
    const auto expected = state_dict(rows);
    for (const auto& [name, value] : expected.pairs()) {
      const auto& mine = state.at(name.as_string()).as_tensor();
      std::vector<Slice> slices, theirs;
      for (const auto& piece : mine.pieces) slices.push_back(piece.slice);
      for (const auto& piece : value.as_tensor().pieces) {
        if (numel(piece.slice) > 0) theirs.push_back(piece.slice);
      }
      EXPECT_EQ(slices, theirs) << name.as_string();
    }
    {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : sharded_parameters(flat)) parameter.local.fill_(8);
    }
    load_state_dict(flat, expected);
    expect_same_state(full_state_dict(rows), full_state_dict(flat), "loaded");
  });
}

TEST(FlatUnits, HaveNoFlatStateOfFsdp1) {
  run_mesh(2, [](Mesh& mesh) {
    auto pair = make_pair();
    shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
    const StateDictTypeScope local(pair, {.type = StateDictType::local});
    EXPECT_THAT(error_of([&] { static_cast<void>(state_dict(pair)); }),
                HasSubstr("when parameters are flatten and sharded"));
  });
}

TEST(FlatUnits, StepInBackwardAsRows) {
  run_mesh(2, [](Mesh& mesh) {
    std::vector<FullState> states;
    for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
      auto pair = make_pair();
      shard_pair(pair, mesh, {.layout = layout}, /*is_hybrid=*/false);
      apply_optimizer_in_backward(
          sharded_parameters(pair), [](std::vector<torch::Tensor> parameters) {
            return std::make_unique<torch::optim::Adam>(std::move(parameters), 0.01);
          });
      for (int round = 0; round < kRounds; ++round)
        pair(torch::full({2, 6}, 0.1 * round), true, false).square().mean().backward();
      states.push_back(full_state_dict(pair));
    }
    expect_same_state(states[0], states[1], "after steps");
  });
}

// Ranks that hold nothing of a model's parameters take part in norms.
TEST(FlatUnits, HaveTheNormsOfRows) {
  run_mesh(4, [](Mesh& mesh) {
    for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      std::vector<double> norms;
      for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
        nn::Linear linear(4, 3);
        {
          const torch::NoGradGuard no_grad;
          for (auto& parameter : linear->parameters()) parameter.fill_(0.5);
        }
        fully_shard(linear, mesh, {.layout = layout});
        call_module(linear, torch::full({1, 4}, mesh.rank() + 1.0F)).square().sum().backward();
        norms.push_back(clip_grad_norm(sharded_parameters(linear), 0.1, p));
        norms.push_back(get_total_norm(sharded_parameters(linear), NormOf::gradients, p));
      }
      EXPECT_NEAR(norms[0], norms[2], 1e-5 * norms[0]) << p;
      EXPECT_NEAR(norms[1], norms[3], 1e-5 * norms[1]) << p;
    }
  });
}

struct NumbersImpl : nn::Module {
  torch::Tensor numbers;
  explicit NumbersImpl(torch::ScalarType type) {
    numbers = register_parameter("numbers", torch::arange(5).to(type), /*requires_grad=*/false);
  }
  torch::Tensor forward() { return numbers * 2; }
};
TESSERA_MODULE(Numbers);

// FSDP1 refuses them; FSDP2 does not.
TEST(FlatUnits, TakeTypesThatRowsTake) {
  run_mesh(2, [](Mesh& mesh) {
    for (const auto type : {torch::kLong, torch::kBool, torch::kComplexFloat, torch::kDouble}) {
      Numbers module(type);
      fully_shard(module, mesh, {.layout = ShardLayout::flat});
      EXPECT_TRUE(testing::equal(full_state_dict(module)["numbers"], torch::arange(5).to(type)));
      EXPECT_TRUE(testing::equal(module(), torch::arange(5).to(type) * 2));
    }
  });
}

TEST(FlatUnits, RefuseToBeCutAlongDimensions) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(4, 4);
    EXPECT_THAT(error_of([&] {
                  fully_shard(linear, mesh,
                              {.layout = ShardLayout::flat,
                               .shard_placement = [](const torch::Tensor&) { return 0; }});
                }),
                HasSubstr("a flat layout cuts parameters along none"));
  });
}

// What travels arrives as the parameters where a transport can do that.
TEST(FlatUnits, AreGatheredWithoutACopy) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    run_mesh(
        2,
        [&](Mesh& mesh) {
          testing::Counts counts;
          testing::count(mesh, counts);
          auto pair = make_pair();
          shard_pair(pair, mesh, {.layout = layout}, /*is_hybrid=*/false);
          pair(torch::ones({2, 6}), true, false).square().mean().backward();
          EXPECT_EQ(counts.gathers, 5);  // of the root one
          EXPECT_EQ(counts.gathers_in_place, layout == ShardLayout::flat ? 5 : 0);
        },
        std::chrono::seconds(30), /*same_host=*/false);
  }
}

// Shards that change while they travel: what was sent is what they were.
TEST(FlatUnits, MayChangeWhileTheyAreGathered) {
  for (const bool same_host : {true, false}) {
    run_mesh(
        2,
        [](Mesh& mesh) {
          auto pair = make_pair();
          shard_pair(pair, mesh, {.layout = ShardLayout::flat}, /*is_hybrid=*/false);
          const auto before = full_state_dict(pair);
          auto handle = start_unshard(pair);
          {
            const torch::NoGradGuard no_grad;
            for (const auto& parameter : sharded_parameters(pair)) parameter.local.mul_(2);
          }
          handle.wait();
          for (const auto& entry : pair->named_parameters())
            EXPECT_TRUE(testing::equal(entry.value(), before[entry.key()])) << entry.key();
        },
        std::chrono::seconds(30), same_host);
  }
}

// Units of both layouts in one model.
TEST(FlatUnits, StandBesideRows) {
  run_mesh(3, [](Mesh& mesh) {
    std::vector<FullState> states;
    for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
      auto pair = make_pair();
      fully_shard(pair->first, mesh, {.layout = layout});
      fully_shard(pair->second, mesh);
      fully_shard(pair, mesh, {.layout = layout});
      torch::optim::SGD optimizer(local_tensors(sharded_parameters(pair)),
                                  torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int round = 0; round < kRounds; ++round) {
        optimizer.zero_grad();
        pair(torch::full({2, 6}, 0.1 * mesh.rank()), true, false).square().mean().backward();
        optimizer.step();
      }
      states.push_back(full_state_dict(pair));
    }
    expect_same_state(states[0], states[1], "after steps");
  });
}

}  // namespace
}  // namespace tessera
