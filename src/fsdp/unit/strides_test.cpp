// Parameters in any layout: channels_last, transposed, slices of larger tensors. However they are
// wrapped, training with AdamW is what torch::optim::AdamW makes of contiguous ones, gradients lie
// as torch has it, and nothing is written between a slice's elements.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_mesh;

constexpr int kTrainingSteps = 4;
constexpr double kRate = 1e-2, kDecay = 0.1;
constexpr float kBetween = 77;  // what lies between the elements of slices

// A parameter and the memory that it is a part of.
struct Laid {
  torch::Tensor base, parameter;
};

enum class Layout { contiguous, permuted, channels_last, rows, columns, every_other, ones, kCount };

Laid lay_out(Layout layout, const torch::Tensor& values, std::mt19937& random) {
  const auto dims = values.dim();
  std::vector<std::int64_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  auto laid = [](torch::Tensor base, torch::Tensor part, const torch::Tensor& from) {
    part.copy_(from);
    return Laid{std::move(base), std::move(part)};
  };
  auto sizes = values.sizes().vec();
  switch (layout) {
    case Layout::permuted: {
      std::ranges::shuffle(order, random);
      std::vector<std::int64_t> back(dims);
      for (std::int64_t i = 0; i < dims; ++i) back[order[i]] = i;
      const auto base = values.permute(order).contiguous();
      return {base, base.permute(back)};
    }
    case Layout::channels_last: {
      if (dims < 4) return {values, values};
      const auto format =
          dims == 4 ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::ChannelsLast3d;
      const auto base = values.contiguous(format);
      return {base, base};
    }
    case Layout::rows: {  // dense, behind other elements
      sizes[0] += 3;
      const auto base = torch::full(sizes, kBetween);
      return laid(base, base.narrow(0, 2, values.size(0)), values);
    }
    case Layout::columns: {
      sizes.back() += 2;
      const auto base = torch::full(sizes, kBetween);
      return laid(base, base.narrow(-1, 1, values.size(-1)), values);
    }
    case Layout::every_other: {
      sizes[0] *= 2;
      const auto base = torch::full(sizes, kBetween);
      return laid(base, base.slice(0, 0, sizes[0], 2), values);
    }
    case Layout::ones: {  // a dimension of one element, whose stride says nothing
      auto strides = values.strides().vec();
      for (std::int64_t i = 0; i < dims; ++i) strides[i] = sizes[i] == 1 ? 1000 : strides[i];
      return {values, values.as_strided(sizes, strides)};
    }
    default:
      return {values, values};
  }
}

std::vector<torch::Tensor> values_of(std::uint64_t seed) {
  std::mt19937 random(seed);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<torch::Tensor> all;
  for (int i = 0; i < 7; ++i) {
    std::vector<std::int64_t> sizes(1 + (i + seed) % 5);
    for (auto& size : sizes) size = 1 + static_cast<std::int64_t>(random() % 4);
    all.push_back(torch::randn(sizes, generator));
  }
  return all;
}

std::vector<Laid> laid_of(std::uint64_t seed) {
  std::mt19937 random(seed + 1);
  std::vector<Laid> all;
  for (const auto& values : values_of(seed)) {
    const auto layout = static_cast<Layout>(random() % static_cast<int>(Layout::kCount));
    all.push_back(lay_out(layout, values, random));
  }
  return all;
}

// Two modules, so that wrapping each makes several units.
struct PileImpl : nn::Module {
  std::vector<torch::Tensor> parameters_;
  std::size_t skipped = 1000;
  PileImpl(std::vector<torch::Tensor> all, std::size_t first) {
    for (std::size_t i = 0; i < all.size(); ++i)
      parameters_.push_back(register_parameter("p" + std::to_string(first + i), all[i]));
  }
  // A sum of one square for each parameter, each of its own elements of `x`.
  torch::Tensor forward(const torch::Tensor& x) {
    auto sum = torch::zeros({});
    std::int64_t at = 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& parameter = parameters_[i];
      const auto mine = x.narrow(0, at, parameter.numel()).view(parameter.sizes());
      at += parameter.numel();
      if (i != skipped) sum = sum + (parameter * mine + mine).square().sum();
    }
    return sum;
  }
};
TESSERA_MODULE(Pile);

struct PilesImpl : nn::Module {
  Pile first{nullptr}, second{nullptr};
  std::int64_t elements = 0;  // of the first
  explicit PilesImpl(const std::vector<Laid>& laid) {
    std::vector<torch::Tensor> all;
    for (const auto& one : laid) all.push_back(one.parameter);
    const auto half = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    for (auto it = all.begin(); it != half; ++it) elements += it->numel();
    first = register_module("first", Pile(std::vector(all.begin(), half), 0));
    second = register_module("second", Pile(std::vector(half, all.end()), all.size() / 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return first(x.narrow(0, 0, elements)) + second(x.narrow(0, elements, x.size(0) - elements));
  }
};
TESSERA_MODULE(Piles);

torch::Tensor pile_input(int step, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 10 * step + rank);
  return torch::randn({7 * 1024}, generator);
}

// Each rank leaves out another parameter in some steps.
void skip_some(PilesImpl& piles, int step, int rank) {
  piles.first->skipped = step % 2 == 1 ? static_cast<std::size_t>(rank) : 1000;
  piles.second->skipped = step % 2 == 1 ? static_cast<std::size_t>(1 + rank) : 1000;
}

// One process, contiguous, on all ranks' inputs.
struct Expected {
  std::vector<double> norms;
  std::vector<torch::Tensor> parameters, exp_avgs, exp_avg_sqs;
};
Expected expected_piles(std::uint64_t seed, int world) {
  std::vector<Laid> plain;
  for (const auto& values : values_of(seed)) plain.push_back({values, values});
  Piles piles(plain);
  torch::optim::AdamW optimizer(piles->parameters(),
                                torch::optim::AdamWOptions(kRate).weight_decay(kDecay));
  Expected found;
  for (int step = 0; step < kTrainingSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < world; ++rank) {
      skip_some(*piles, step, rank);
      (piles->forward(pile_input(step, rank)) / world).backward();
    }
    found.norms.push_back(torch::nn::utils::clip_grad_norm_(piles->parameters(), 1.0));
    optimizer.step();
  }
  for (const auto& parameter : piles->parameters()) {
    found.parameters.push_back(parameter.detach());
    const auto& state = static_cast<torch::optim::AdamWParamState&>(
        *optimizer.state().at(parameter.unsafeGetTensorImpl()));
    found.exp_avgs.push_back(state.exp_avg());
    found.exp_avg_sqs.push_back(state.exp_avg_sq());
  }
  return found;
}

enum class Wrap { none, replicate, replicate_each, no_shard, fully_shard, copies };

void wrap_piles(Piles& piles, const Mesh& mesh, Wrap kind) {
  const auto each = [&](const auto& apply) {
    apply(piles->first);
    apply(piles->second);
    apply(piles);
  };
  switch (kind) {
    case Wrap::none:
      return;
    case Wrap::replicate:
      return replicate(piles, mesh, {.bucket_bytes = 200, .first_bucket_bytes = 100});
    case Wrap::replicate_each:
      return each([&](auto& module) { replicate(module, mesh); });
    case Wrap::no_shard:
      FullyShardedDataParallel<Piles>(
          piles, mesh, {.sharding_strategy = ShardingStrategy::no_shard, .use_orig_params = true});
      return;
    case Wrap::fully_shard:
      return each([&](auto& module) { fully_shard(module, mesh); });
    case Wrap::copies:
      return each([&](auto& module) { fully_shard(module, mesh.split(1)); });
  }
}

constexpr int kPileRanks = 2;

void pile_backward(Piles& piles, int step, const Mesh& mesh, Wrap kind) {
  // One process has the inputs of all.
  for (int rank = 0; rank < kPileRanks; ++rank) {
    if (kind != Wrap::none && rank != mesh.rank()) continue;
    skip_some(*piles, step, rank);
    auto loss = piles(pile_input(step, rank));
    (kind == Wrap::none ? loss / kPileRanks : loss).backward();
  }
}

torch::Tensor held_rows(const ShardedParameter& parameter, const torch::Tensor& whole) {
  if (!parameter.sharded) return whole;
  return whole.narrow(0, parameter.offset, parameter.local.size(0));
}

void expect_equal(const torch::Tensor& found, const torch::Tensor& wanted,
                  const std::string& what) {
  EXPECT_TRUE(testing::allclose(found, wanted, 1e-5, 1e-6)) << what;
}

void expect_untouched(const Laid& laid, const std::string& what) {
  if (laid.base.numel() == laid.parameter.numel()) return;
  const auto count = laid.base.numel() - laid.parameter.numel();
  EXPECT_EQ((laid.base == kBetween).sum().item<std::int64_t>(), count) << what;
}

// Another optimizer that has taken the state over goes on alike.
void expect_state_moves(const std::vector<ShardedParameter>& parameters, const AdamW& optimizer) {
  AdamW second(parameters, {.lr = kRate, .weight_decay = kDecay});
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& state = optimizer.state(0, i);
    second.set_state(0, i,
                     {state.step.clone(), state.exp_avg.contiguous().clone(),
                      state.exp_avg_sq.contiguous().clone()});
    EXPECT_TRUE(testing::equal(second.state(0, i).exp_avg, state.exp_avg)) << i;
    EXPECT_TRUE(testing::equal(second.state(0, i).exp_avg_sq, state.exp_avg_sq)) << i;
  }
}

class Strides : public ::testing::TestWithParam<std::tuple<Wrap, int>> {};

TEST_P(Strides, TrainAsContiguousOnes) {
  const auto [kind, seed] = GetParam();
  const auto wanted = expected_piles(seed, kPileRanks);
  run_mesh(kind == Wrap::none ? 1 : kPileRanks, [&, kind = kind, seed = seed](Mesh& mesh) {
    const auto laid = laid_of(seed);
    Piles piles(laid);
    wrap_piles(piles, mesh, kind);
    const auto parameters = sharded_parameters(piles);
    AdamW optimizer(parameters, {.lr = kRate, .weight_decay = kDecay});
    for (int step = 0; step < kTrainingSteps; ++step) {
      optimizer.zero_grad();
      pile_backward(piles, step, mesh, kind);
      for (const auto& parameter : parameters) {
        EXPECT_TRUE(
            torch::autograd::utils::obeys_layout_contract(parameter.local.grad(), parameter.local))
            << parameter.name() << " " << parameter.local.strides();
      }
      EXPECT_NEAR(clip_grad_norm(parameters, 1.0), wanted.norms[step], 1e-5 * wanted.norms[step]);
      optimizer.step();
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = parameters[i];
      const auto what = parameter.name() + ", step strides " + c10::str(parameter.local.strides());
      const auto& state = optimizer.state(0, i);
      expect_equal(parameter.local.detach(), held_rows(parameter, wanted.parameters[i]), what);
      expect_equal(state.exp_avg, held_rows(parameter, wanted.exp_avgs[i]), what);
      expect_equal(state.exp_avg_sq, held_rows(parameter, wanted.exp_avg_sqs[i]), what);
      if (!parameter.sharded) expect_untouched(laid[i], what);
    }
    expect_state_moves(parameters, optimizer);
    const auto full = full_state_dict(piles);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      expect_equal(full[parameters[i].name()], wanted.parameters[i], parameters[i].name());
  });
}

std::string strides_name(const ::testing::TestParamInfo<Strides::ParamType>& given) {
  constexpr const char* kNames[] = {"Alone",   "Replicate",  "ReplicateEach",
                                    "NoShard", "FullyShard", "Copies"};
  const auto [kind, seed] = given.param;
  return kNames[static_cast<int>(kind)] + std::to_string(seed);
}

INSTANTIATE_TEST_SUITE_P(All, Strides,
                         ::testing::Combine(::testing::Values(Wrap::none, Wrap::replicate,
                                                              Wrap::replicate_each, Wrap::no_shard,
                                                              Wrap::fully_shard, Wrap::copies),
                                            ::testing::Range(0, 12)),
                         strides_name);

// What the kernel cannot take ---------------------------------------------------------------------

struct LooseImpl : nn::Module {
  explicit LooseImpl(const std::vector<torch::Tensor>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      register_parameter("p" + std::to_string(i), tensors[i]);
  }
};
TESSERA_MODULE(Loose);

TEST(AdamWMemory, RefusesWhatItCannotUpdateBeforeItUpdatesAny) {
  struct Bad {
    torch::Tensor parameter, gradient;
    const char* text;
  };
  const auto four = torch::ones({4});
  const Bad all[] = {{torch::ones({1}).expand({4}), four, "share memory"},
                     {torch::ones({4}), four.to_sparse(), "sparse gradients"}};
  for (const auto& bad : all) {
    Loose loose(std::vector<torch::Tensor>{torch::ones({3}), bad.parameter});
    const auto parameters = sharded_parameters(loose);
    parameters[0].local.mutable_grad() = torch::ones({3});
    parameters[1].local.mutable_grad() = bad.gradient;
    AdamW optimizer(parameters);
    const auto text = error_of([&] { optimizer.step(); });
    EXPECT_THAT(text, HasSubstr(bad.text));
    EXPECT_THAT(text, HasSubstr("p1"));
    EXPECT_TRUE(testing::equal(parameters[0].local, torch::ones({3})));
    EXPECT_FALSE(optimizer.state(0, 0).defined());
    torch::optim::AdamW theirs(local_tensors(parameters));
    EXPECT_ANY_THROW(theirs.step());
  }
}

// Elements of both are updated twice, each with moments of its own.
TEST(AdamWMemory, ParametersThatOverlapHaveStatesOfTheirOwn) {
  const auto train = [](auto&& make_optimizer) {
    const auto base = torch::linspace(-1, 1, 1000);
    Loose loose(std::vector<torch::Tensor>{base.narrow(0, 0, 6), base.narrow(0, 2, 10),
                                           base.narrow(0, 4, 8).view({2, 4}).t()});
    const auto parameters = sharded_parameters(loose);
    auto optimizer = make_optimizer(parameters);
    for (int step = 0; step < 3; ++step) {
      for (const auto& parameter : parameters) {
        auto& gradient = parameter.local.mutable_grad();
        gradient = torch::sin(parameter.local.detach() * 3 + static_cast<double>(step));
      }
      optimizer.step();
    }
    return base;
  };
  const auto ours = train([](const auto& parameters) {
    return AdamW(parameters, {.lr = kRate, .weight_decay = kDecay});
  });
  const auto theirs = train([](const auto& parameters) {
    return torch::optim::AdamW(local_tensors(parameters),
                               torch::optim::AdamWOptions(kRate).weight_decay(kDecay));
  });
  EXPECT_TRUE(testing::allclose(ours, theirs, 1e-5, 1e-6));
}

}  // namespace
}  // namespace tessera
