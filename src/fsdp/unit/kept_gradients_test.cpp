// What one backward leaves for another: averages that are not averaged again, and gradients that
// NoSync keeps on each rank, which FullParams leaves alone and zero_grad treats as PyTorch does:
// FSDP1 and DDP forget them, FSDP2 does not.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/ddp.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

struct PairImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr};
  PairImpl() {
    a = register_module("a", nn::Linear(4, 4));
    b = register_module("b", nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return b(torch::tanh(a(x))); }
};
TESSERA_MODULE(Pair);

Pair make_pair_of_layers() {
  auto pair = with_values(Pair(), 6);
  pair->to(torch::kDouble);
  return pair;
}

torch::Tensor pair_input(int micro, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * micro + rank);
  return torch::randn({3, 4}, generator, torch::kDouble);
}

torch::Tensor pair_loss(Pair& pair, int micro, int rank) {
  return pair(pair_input(micro, rank)).square().sum();
}

// The sum of each parameter's gradients over `ranks` in these micro-batches.
std::vector<torch::Tensor> sums_of(const std::vector<int>& micros, int ranks) {
  auto pair = make_pair_of_layers();
  for (const int micro : micros) {
    for (int rank = 0; rank < ranks; ++rank) pair_loss(pair, micro, rank).backward();
  }
  std::vector<torch::Tensor> sums;
  for (const auto& parameter : pair->parameters())
    sums.push_back(parameter.grad().defined() ? parameter.grad()
                                              : torch::zeros_like(parameter.detach()));
  return sums;
}

enum class KeptKind {
  fully_shard,
  other_type,
  kept_whole,
  hybrid,
  original,
  original_other_type,
  flat,
  flat_other_type,
  no_shard,
  replicate
};

std::ostream& operator<<(std::ostream& out, KeptKind kind) {
  return out << "kind " << static_cast<int>(kind);
}

bool is_fsdp2(KeptKind kind) {
  return kind <= KeptKind::hybrid;
}

void wrap_pair(Pair& pair, const Mesh& mesh, KeptKind kind) {
  const MixedPrecision other{.reduce_dtype = torch::kFloat};
  const auto fsdp1 = [&](bool original, const MixedPrecision& precision,
                         ShardingStrategy strategy = ShardingStrategy::full_shard) {
    FullyShardedDataParallel<Pair>(
        pair, mesh,
        {.sharding_strategy = strategy, .mixed_precision = precision, .use_orig_params = original});
  };
  switch (kind) {
    case KeptKind::fully_shard:
      return fully_shard(pair, mesh);
    case KeptKind::other_type:
      return fully_shard(pair, mesh, {.mixed_precision = other});
    case KeptKind::kept_whole:
      return fully_shard(pair, mesh,
                         {.reshard_after_forward = false, .reshard_after_backward = false});
    case KeptKind::hybrid:
      return fully_shard(pair, mesh.split(1));
    case KeptKind::original:
      return fsdp1(true, {});
    case KeptKind::original_other_type:
      return fsdp1(true, other);
    case KeptKind::flat:
      return fsdp1(false, {});
    case KeptKind::flat_other_type:
      return fsdp1(false, other);
    case KeptKind::no_shard:
      return fsdp1(true, {}, ShardingStrategy::no_shard);
    case KeptKind::replicate:
      return replicate(pair, mesh);
  }
}

void pair_backward(Pair& pair, int micro, const Mesh& mesh, bool sync) {
  std::optional<NoSync> quiet;
  if (!sync) quiet.emplace(pair);
  pair_loss(pair, micro, mesh.rank()).backward();
}

// `whole`: of each parameter of a Pair.
void expect_gradients_of(Pair& pair, const std::vector<torch::Tensor>& whole,
                         const std::string& what, double tolerance = 1e-5) {
  std::vector<torch::Tensor> all;
  for (const auto& one : whole) all.push_back(one.reshape({-1}));
  for (const auto& parameter : sharded_parameters(pair)) {
    const auto& local = parameter.local;
    torch::Tensor expected;
    if (!parameter.members.empty()) {
      // Behind the last parameter is what fills the flat one up.
      const auto flat = torch::constant_pad_nd(torch::cat(all), {0, 64});
      expected = flat.narrow(0, parameter.offset, local.numel());
    } else {
      std::size_t index = 0;
      for (const auto& entry : pair->named_parameters()) {
        if (entry.key() == parameter.name()) break;
        ++index;
      }
      expected = parameter.flat ? all[index].narrow(0, parameter.offset, local.numel())
                                : whole[index].narrow(0, parameter.offset, local.size(0));
    }
    const auto gradient =
        local.grad().defined() ? local.grad().clone() : torch::zeros_like(local.detach());
    EXPECT_TRUE(testing::allclose(gradient, expected, tolerance, tolerance))
        << what << ", " << parameter.name() << gradient << expected;
  }
}

std::vector<torch::Tensor> scaled(std::vector<torch::Tensor> tensors, double factor) {
  for (auto& tensor : tensors) tensor = tensor * factor;
  return tensors;
}

// Averages ----------------------------------------------------------------------------------------

struct Reducing {
  const char* name;
  std::function<void(Pair&)> set;
  double factor;  // of the sum over the ranks
};

void expect_averaged_once(KeptKind kind, int ranks, const Reducing& how) {
  run_mesh(ranks, [&](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    wrap_pair(pair, mesh, kind);
    how.set(pair);
    const auto expect = [&](const std::vector<int>& micros, const char* when) {
      expect_gradients_of(pair, scaled(sums_of(micros, ranks), how.factor),
                          std::string(how.name) + " " + when);
    };
    pair_backward(pair, 0, mesh, true);
    expect({0}, "once");
    pair_backward(pair, 1, mesh, true);
    expect({0, 1}, "twice");
    pair_backward(pair, 2, mesh, false);
    pair_backward(pair, 3, mesh, false);
    pair_backward(pair, 4, mesh, true);
    expect({0, 1, 2, 3, 4}, "with some that waited");
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(pair)), 0.1);
    for (const bool to_none : {true, false}) {
      optimizer.zero_grad();
      pair_backward(pair, 0, mesh, true);
      pair_backward(pair, 1, mesh, false);
      optimizer.zero_grad(to_none);
      pair_backward(pair, 2, mesh, true);
      if (is_fsdp2(kind)) {
        expect({1, 2}, "zeroed in between");
      } else {
        expect({2}, "zeroed in between");
      }
    }
    abandon_step(pair);
    pair_backward(pair, 3, mesh, true);
    expect({3}, "after a reset");
  });
}

TEST(Averages, AreNotReducedAgain_F32) {
  for (const int ranks : {1, 2}) {
    const std::vector<Reducing> all{
        {"by default", [](Pair&) {}, 1.0 / ranks},
        {"divided by 1", [](Pair& pair) { set_gradient_divide_factor(pair, 1); }, 1},
        {"divided by 5", [](Pair& pair) { set_gradient_divide_factor(pair, 5); }, 0.2},
        {"with a hook",
         [](Pair& pair) { set_all_reduce_hook(pair, [](torch::Tensor& sum) { sum.mul_(3); }); },
         3.0 / ranks},
    };
    for (const auto& how : all) {
      for (const auto kind : {KeptKind::replicate, KeptKind::fully_shard, KeptKind::no_shard,
                              KeptKind::original, KeptKind::flat})
        expect_averaged_once(kind, ranks, how);
    }
  }
}

// A hook of the whole reduction that does not average.
TEST(Averages, OfACommHookAreNotReducedAgain) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Pair> model(
        make_pair_of_layers(), mesh,
        {.sharding_strategy = ShardingStrategy::no_shard, .use_orig_params = true});
    model.register_comm_hook([mesh](torch::Tensor& gradient, torch::Tensor&) {
      mesh.all_reduce_sum(gradient);
      gradient.mul_(7);
    });
    for (const int micro : {0, 1}) pair_backward(model.module(), micro, mesh, true);
    expect_gradients_of(model.module(), scaled(sums_of({0, 1}, 2), 7), "comm hook");
  });
}

// Kept --------------------------------------------------------------------------------------------

constexpr std::array kKeptKinds{KeptKind::fully_shard, KeptKind::other_type,
                                KeptKind::kept_whole,  KeptKind::hybrid,
                                KeptKind::original,    KeptKind::original_other_type,
                                KeptKind::flat,        KeptKind::flat_other_type,
                                KeptKind::no_shard,    KeptKind::replicate};

class Kept : public ::testing::TestWithParam<KeptKind> {};

TEST_P(Kept, IsForgottenByZeroGradWhereItIsInPyTorch_NS3) {
  const auto kind = GetParam();
  run_mesh(2, [&](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    wrap_pair(pair, mesh, kind);
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(pair)), 0.1);
    AdamW adamw(sharded_parameters(pair));
    const std::vector<std::pair<const char*, std::function<void()>>> zeros{
        {"by nobody", [] {}},
        {"by the module", [&] { pair->zero_grad(); }},
        {"by an optimizer", [&] { optimizer.zero_grad(); }},
        {"by an optimizer, in place", [&] { optimizer.zero_grad(/*set_to_none=*/false); }},
        {"by AdamW", [&] { adamw.zero_grad(); }},
    };
    for (const bool is_first : {true, false}) {
      for (const auto& [by, zero] : zeros) {
        abandon_step(pair);
        if (!is_first) pair_backward(pair, 0, mesh, true);
        pair_backward(pair, 1, mesh, false);
        pair_backward(pair, 2, mesh, false);
        zero();
        pair_backward(pair, 3, mesh, false);
        pair_backward(pair, 4, mesh, true);
        std::vector<int> expected{3, 4};
        if (is_fsdp2(kind) || by == zeros[0].first) expected = {1, 2, 3, 4};
        if (!is_first && by == zeros[0].first) expected.push_back(0);
        expect_gradients_of(pair, scaled(sums_of(expected, 2), 0.5), by);
      }
    }
  });
}

// It comes with the step that it belongs to, and not when the parameter is thawed.
TEST_P(Kept, OfAFrozenParameterDoesNotComeBack) {
  const auto kind = GetParam();
  if (kind == KeptKind::flat || kind == KeptKind::flat_other_type) return;  // frozen as a whole
  run_mesh(2, [&](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    wrap_pair(pair, mesh, kind);
    const auto average = [](const std::vector<int>& micros) {
      return scaled(sums_of(micros, 2), 0.5);
    };
    pair_backward(pair, 0, mesh, false);
    pair->a->weight.set_requires_grad(false);
    pair_backward(pair, 1, mesh, true);
    // As FSDP2 and a single process; FSDP1's backward takes it away.
    auto expected = average({0, 1});
    const bool is_fsdp1 = kind == KeptKind::original || kind == KeptKind::original_other_type;
    expected[0] = is_fsdp1 ? torch::zeros_like(expected[0]) : average({0})[0];
    expect_gradients_of(pair, expected, "frozen");
    for (const auto& parameter : sharded_parameters(pair))
      parameter.local.mutable_grad() = torch::Tensor();
    pair->a->weight.set_requires_grad(true);
    pair_backward(pair, 2, mesh, true);
    expect_gradients_of(pair, average({2}), "thawed");
  });
}

TEST_P(Kept, IsLeftAloneByFullParams) {
  const auto kind = GetParam();
  run_mesh(2, [&](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    wrap_pair(pair, mesh, kind);
    pair_backward(pair, 0, mesh, true);
    for (const bool with_grads : {false, true}) {
      pair_backward(pair, 1, mesh, false);
      const FullParams whole(pair, {.with_grads = with_grads});
    }
    pair_backward(pair, 2, mesh, true);
    expect_gradients_of(pair, scaled(sums_of({0, 1, 1, 2}, 2), 0.5), "full");
  });
}

std::string kept_name(const ::testing::TestParamInfo<KeptKind>& given) {
  constexpr const char* kNames[] = {"FullyShard", "OtherType",         "KeptWhole", "Hybrid",
                                    "Original",   "OriginalOtherType", "Flat",      "FlatOtherType",
                                    "NoShard",    "Replicate"};
  return kNames[static_cast<int>(given.param)];
}

INSTANTIATE_TEST_SUITE_P(All, Kept, ::testing::ValuesIn(kKeptKinds), kept_name);

// What is kept stands for what is set aside, too: half of it is half of nobody knows what.
TEST(Averages, WhatIsKeptBesideThemMayBeZeroedAndNotChanged) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool zeroes : {true, false}) {
      auto pair = make_pair_of_layers();
      replicate(pair, mesh);
      set_gradient_divide_factor(pair, 1);
      pair_backward(pair, 0, mesh, true);
      pair_backward(pair, 1, mesh, false);
      for (auto& parameter : pair->parameters()) parameter.mutable_grad().mul_(zeroes ? 0 : 0.5);
      const auto text = testing::error_of([&] { pair_backward(pair, 2, mesh, true); });
      EXPECT_EQ(text.find("was changed between") != std::string::npos, !zeroes) << text;
    }
  });
}

// Both are in grad(), where a new rule would be applied to both.
TEST(Averages, RulesStayWhileTheyStandBesideWhatIsKept) {
  run_mesh(2, [](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    replicate(pair, mesh);
    pair_backward(pair, 0, mesh, true);
    pair_backward(pair, 1, mesh, false);
    const auto double_it = [](torch::Tensor& sum) { sum.mul_(2); };
    const auto factor = testing::error_of([&] { set_gradient_divide_factor(pair, 1); });
    const auto hook = testing::error_of([&] { set_all_reduce_hook(pair, double_it); });
    EXPECT_NE(factor.find("stand together in grad()"), std::string::npos) << factor;
    EXPECT_NE(hook.find("stand together in grad()"), std::string::npos) << hook;
    set_gradient_divide_factor(pair, 2);  // as it was
    set_all_reduce_hook(pair, {});
    pair_backward(pair, 2, mesh, true);
    expect_gradients_of(pair, scaled(sums_of({0, 1, 2}, 2), 0.5), "refused");
    for (const bool to_none : {true, false}) {
      set_gradient_divide_factor(pair, 2);
      pair_backward(pair, 0, mesh, true);
      pair_backward(pair, 1, mesh, false);
      for (auto& parameter : pair->parameters()) {
        if (to_none) parameter.mutable_grad() = torch::Tensor();
        if (!to_none) parameter.mutable_grad().zero_();
      }
      set_gradient_divide_factor(pair, 1);
      pair_backward(pair, 3, mesh, true);
      expect_gradients_of(pair, sums_of({3}, 2), "zeroed");
      pair->zero_grad();
    }
  });
}

TEST_P(Kept, IsReducedByTheRulesOfItsOwnReduction) {
  run_mesh(2, [&](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    wrap_pair(pair, mesh, GetParam());
    set_gradient_divide_factor(pair, 5);
    set_all_reduce_hook(pair, [](torch::Tensor& sum) { sum.mul_(3); });
    set_is_last_backward(pair, false);
    pair_backward(pair, 0, mesh, true);
    set_gradient_divide_factor(pair, 1);
    set_all_reduce_hook(pair, {});
    set_is_last_backward(pair, true);
    pair_backward(pair, 1, mesh, true);
    auto expected = scaled(sums_of({0}, 2), 0.6);
    const auto later = sums_of({1}, 2);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += later[i];
    expect_gradients_of(pair, expected, "a factor that changed meanwhile");
  });
}

// One that counts goes on counting; one that is set while two backwards are under way is no
// mixture.
TEST(Averages, AHookKeepsWhatIsInIt) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool sharded : {true, false}) {
      auto pair = make_pair_of_layers();
      if (sharded) fully_shard(pair, mesh);
      if (!sharded) replicate(pair, mesh);
      set_all_reduce_hook(pair, [n = 0](torch::Tensor& sum) mutable { sum.mul_(++n); });
      for (const int micro : {0, 1, 2}) pair_backward(pair, micro, mesh, true);
      auto expected = scaled(sums_of({0}, 2), 0.5);
      for (const int micro : {1, 2}) {
        const auto more = scaled(sums_of({micro}, 2), 0.5 * (micro + 1));
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += more[i];
      }
      expect_gradients_of(pair, expected, "a hook that counts");
    }
    auto pair = make_pair_of_layers();
    replicate(pair, mesh);
    set_is_last_backward(pair, false);
    for (const int micro : {0, 1}) pair_backward(pair, micro, mesh, true);
    EXPECT_NO_THROW(set_gradient_divide_factor(pair, 1));
    set_is_last_backward(pair, true);
    pair_backward(pair, 2, mesh, true);
    auto expected = scaled(sums_of({0, 1}, 2), 0.5);
    const auto later = sums_of({2}, 2);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += later[i];
    expect_gradients_of(pair, expected, "under way");
  });
}

// Sums that wait for the copies were divided by a part of the factor that was set then.
TEST(KeptSums, ThatWaitAreDividedByTheFactorOfTheirAverage) {
  run_mesh(4, [](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    fully_shard(pair, mesh.split(2), {.mixed_precision = {.reduce_dtype = torch::kHalf}});
    set_gradient_divide_factor(pair, 16);
    set_requires_all_reduce(pair, false);
    pair_backward(pair, 0, mesh, true);
    set_gradient_divide_factor(pair, 2);
    set_requires_all_reduce(pair, true);
    pair_backward(pair, 1, mesh, true);
    expect_gradients_of(pair, scaled(sums_of({0, 1}, 4), 0.5), "half precision", 2e-2);
  });
}

// PyTorch's FSDP1 changes what it keeps, too. Here that is elsewhere.
TEST_P(Kept, MayNotBeScaledWhereItIsNotInGrad) {
  const auto kind = GetParam();
  if (is_fsdp2(kind)) return;
  run_mesh(2, [&](Mesh& mesh) {
    auto pair = make_pair_of_layers();
    wrap_pair(pair, mesh, kind);
    const bool is_there = kind == KeptKind::no_shard || kind == KeptKind::replicate;
    for (const bool is_first : {true, false}) {
      abandon_step(pair);
      if (!is_first) pair_backward(pair, 0, mesh, true);
      pair_backward(pair, 1, mesh, false);
      for (auto& parameter : sharded_parameters(pair)) parameter.local.mutable_grad().mul_(0.5);
      const auto text = testing::error_of([&] { pair_backward(pair, 2, mesh, true); });
      EXPECT_EQ(text.find("was changed between") == std::string::npos, is_there) << text;
      if (!is_there) continue;
      // An average is half of itself as well; what is kept is halved on each rank.
      auto expected = scaled(sums_of(is_first ? std::vector{1} : std::vector{0, 1}, 2), 0.25);
      const auto later = scaled(sums_of({2}, 2), 0.5);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += later[i];
      expect_gradients_of(pair, expected, "scaled");
    }
    // Nothing was lost by the refusal but that backward.
    abandon_step(pair);
    pair_backward(pair, 3, mesh, true);
    expect_gradients_of(pair, scaled(sums_of({3}, 2), 0.5), "after it");
  });
}

struct TwoUnitsImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr};
  TwoUnitsImpl() {
    a = register_module("a", nn::Linear(4, 4));
    b = register_module("b", nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return call_module(b, torch::tanh(call_module(a, x)));
  }
};
TESSERA_MODULE(TwoUnits);

// A refused torch::autograd::grad leaves all gradients where zero_grad finds them.
TEST(RefusedGrad, ChangesNothing) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(TwoUnits(), 3);
    fully_shard(net->a, mesh);
    fully_shard(net->b, mesh);
    fully_shard(net, mesh);
    const auto loss = [&] { return net(torch::ones({2, 4}) * (mesh.rank() + 1)).square().sum(); };
    loss().backward();
    const auto parameters = sharded_parameters(net);
    const auto before = parameters.front().local.grad().clone();
    EXPECT_ANY_THROW(static_cast<void>(torch::autograd::grad({loss()}, {net->b->weight})));
    net->zero_grad();
    loss().backward();
    EXPECT_TRUE(testing::allclose(parameters.front().local.grad(), before));  // and not twice
  });
}

}  // namespace
}  // namespace tessera
