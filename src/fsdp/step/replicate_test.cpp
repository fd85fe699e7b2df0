// replicate with modules that a flat array could not take, and what is frozen in the middle of a
// step: as DistributedDataParallel has them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conformance/forwarding_group.h"
#include "tessera/ddp.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/wrap_scope.h"
#include "torch/mesh_state.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::with_values;

// Layers in single, double and half precision, and a frozen table of numbers.
struct MixedTypesImpl : nn::Module {
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  torch::Tensor table;
  MixedTypesImpl() {
    first = register_module("first", nn::Linear(4, 6));
    second = register_module("second", nn::Linear(6, 6));
    third = register_module("third", nn::Linear(6, 2));
    table = register_parameter("table", torch::arange(4, torch::kLong), false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = first(x).to(torch::kDouble);
    y = second(y).to(torch::kBFloat16);
    return third(y).to(torch::kFloat).square().mean() + 0 * table.sum();
  }
};
TESSERA_MODULE(MixedTypes);

MixedTypes mixed_types() {
  auto net = with_values(MixedTypes(), 11);
  net->second->to(torch::kDouble);
  net->third->to(torch::kBFloat16);
  return net;
}

torch::Tensor input_of(int rank) {
  return torch::linspace(-1, 1, 12).view({3, 4}) * (rank + 1);
}

// The mean of what single processes get for the ranks' batches.
template <typename Model>
std::map<std::string, torch::Tensor> mean_gradients(Model net, int ranks) {
  std::map<std::string, torch::Tensor> gradients;
  for (int rank = 0; rank < ranks; ++rank) {
    net->zero_grad();
    net(input_of(rank)).backward();
    for (const auto& entry : net->named_parameters()) {
      if (!entry.value().grad().defined()) continue;
      auto& mean = gradients[entry.key()];
      const auto part = entry.value().grad().to(torch::kDouble) / ranks;
      mean = mean.defined() ? mean + part : part;
    }
  }
  return gradients;
}

template <typename Model>
void expect_gradients(const Model& net, const std::map<std::string, torch::Tensor>& expected) {
  for (const auto& entry : net->named_parameters()) {
    const auto found = expected.find(entry.key());
    ASSERT_EQ(entry.value().grad().defined(), found != expected.end()) << entry.key();
    if (found == expected.end()) continue;
    EXPECT_EQ(entry.value().grad().scalar_type(), entry.value().scalar_type()) << entry.key();
    const bool is_short = entry.value().scalar_type() == torch::kBFloat16;
    EXPECT_TRUE(testing::allclose(entry.value().grad().to(torch::kDouble), found->second,
                                  is_short ? 2e-2 : 1e-4, 1e-6))
        << entry.key();
  }
}

TEST(Replicate, TakesParametersOfSeveralTypes) {
  for (const int ranks : {1, 2, 3}) {
    for (const std::int64_t bucket_bytes : {64, 1 << 20}) {
      run_mesh(ranks, [&](Mesh& mesh) {
        auto net = mixed_types();
        replicate(net, mesh, {.bucket_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes});
        for (int pass = 0; pass < 2; ++pass) {
          net->zero_grad();
          net(input_of(mesh.rank())).backward();
          expect_gradients(net, mean_gradients(mixed_types(), ranks));
        }
      });
    }
  }
}

TEST(Replicate, ItsUnitsMayBeOfDifferentTypes) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = mixed_types();
    replicate(net, mesh);
    net(input_of(mesh.rank())).backward();
    const double norm = clip_grad_norm(sharded_parameters(net), 1e9);
    EXPECT_EQ(mesh.all_reduce_max(norm), norm);
  });
}

struct ThreeImpl : nn::Module {
  std::vector<nn::Linear> layers;
  ThreeImpl() {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(4, 4)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x.square().mean();
  }
};
TESSERA_MODULE(Three);

// As in one process. (PyTorch's DistributedDataParallel gives it what its bucket held.)
TEST(Replicate, AParameterThatIsFrozenBeforeTheBackwardGetsNoGradient) {
  for (const std::size_t frozen : {0U, 1U, 2U}) {
    const auto freeze = [&](Three& net) { net->layers[frozen]->weight.set_requires_grad(false); };
    const auto thaw = [&](Three& net) { net->layers[frozen]->weight.set_requires_grad(true); };
    for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
      run_mesh(2, [&](Mesh& mesh) {
        auto net = with_values(Three(), 4);
        replicate(net, mesh, {.bucket_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes});
        for (int pass = 0; pass < 3; ++pass) {
          net->zero_grad();
          thaw(net);
          auto loss = net(input_of(mesh.rank()));
          if (pass == 1) freeze(net);
          loss.backward();
          auto expected = mean_gradients(with_values(Three(), 4), 2);
          if (pass == 1) expected.erase("layer" + std::to_string(frozen) + ".weight");
          expect_gradients(net, expected);
        }
      });
    }
  }
}

// What is frozen for good is waited for by nobody.
TEST(Replicate, AParameterThatIsFrozenBeforeTheForwardGetsNone) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(Three(), 4), alone = with_values(Three(), 4);
    replicate(net, mesh);
    for (int pass = 0; pass < 2; ++pass) {
      net->zero_grad();
      alone->zero_grad();
      if (pass == 1) {
        net->layers[1]->weight.set_requires_grad(false);
        alone->layers[1]->weight.set_requires_grad(false);
      }
      net(input_of(mesh.rank())).backward();
      expect_gradients(net, mean_gradients(alone, 2));
    }
  });
}

// Micro-batches ----------------------------------------------------------------------------------

// Its layers may be units.
struct SeenLayersImpl : nn::Module {
  nn::Linear first{nullptr}, second{nullptr};
  SeenLayersImpl() {
    first = register_module("first", nn::Linear(4, 4));
    second = register_module("second", nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return pass(x, true); }
  torch::Tensor pass(const torch::Tensor& x, bool both) {
    const auto hidden = torch::tanh(call_module(first, x));
    return (both ? call_module(second, hidden) : hidden).square().mean();
  }
};
TESSERA_MODULE(SeenLayers);

// One step: how many backwards of each rank come before the one that reduces, and whether that one
// uses both layers.
struct UnevenStep {
  std::vector<int> kept;
  bool both = true;
};

torch::Tensor uneven_input(int rank, int micro) {
  return input_of(10 * rank + micro);
}

std::map<std::string, torch::Tensor> uneven_gradients(const UnevenStep& step) {
  const int ranks = static_cast<int>(step.kept.size());
  auto net = with_values(SeenLayers(), 8);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int micro = 0; micro <= step.kept[rank]; ++micro) {
      const bool both = micro < step.kept[rank] || step.both;
      (net->pass(uneven_input(rank, micro), both) / ranks).backward();
    }
  }
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& entry : net->named_parameters())
    gradients[entry.key()] = entry.value().grad().to(torch::kDouble);
  return gradients;
}

TEST(UnevenMicroBatches, AddUpWhatEachRankHas) {
  const std::vector<UnevenStep> steps{
      {{3, 1}}, {{0, 2}}, {{2, 0}, false}, {{0, 1}, false}, {{1, 1}}};
  for (const bool same_host : {true, false}) {
    for (const bool each : {false, true}) {
      run_mesh(
          2,
          [&](Mesh& mesh) {
            auto net = with_values(SeenLayers(), 8);
            const ReplicateOptions options{.uneven_micro_batches = true};
            if (each) {
              replicate(net->first, mesh, options);
              replicate(net->second, mesh, options);
            }
            replicate(net, mesh, options);
            for (const auto& step : steps) {
              net->zero_grad();
              const auto run = [&](int micro, bool both) {
                call_method(&SeenLayersImpl::pass, net, uneven_input(mesh.rank(), micro), both)
                    .backward();
              };
              const int kept = step.kept[mesh.rank()];
              {
                const NoSync quiet(net);
                for (int micro = 0; micro < kept; ++micro) run(micro, true);
              }
              run(kept, step.both);
              expect_gradients(net, uneven_gradients(step));
            }
          },
          std::chrono::seconds(30), same_host);
    }
  }
}

// Buffers travel before the first forward of a step alone: there the ranks meet.
TEST(UnevenMicroBatches, BringBuffersOfTheFirstRankOncePerStep) {
  for (const bool same_host : {true, false}) {
    run_mesh(
        2,
        [](Mesh& mesh) {
          using Normed = nn::Sequential;
          DistributedDataParallelOptions options;
          options.uneven_micro_batches = true;
          DistributedDataParallel<Normed> model(Normed(nn::Linear(4, 4), nn::BatchNorm1d(4)), mesh,
                                                options);
          for (int step = 0; step < 3; ++step) {
            const int kept = mesh.rank() == 0 ? 3 : 1;
            for (int micro = 0; micro <= kept; ++micro) {
              std::optional<NoSync> quiet;
              if (micro < kept) quiet.emplace(model.module());
              model(uneven_input(mesh.rank(), micro)).square().mean().backward();
            }
            const auto tracked = model->named_buffers()["1.num_batches_tracked"].item<int>();
            EXPECT_EQ(tracked, mesh.rank() == 0 ? 4 * (step + 1) : 4 * step + 2);
          }
        },
        std::chrono::seconds(30), same_host);
  }
}

// Ranks of hosts ----------------------------------------------------------------------------------

// Tells when this rank has said what it knows.
class TellingGroup final : public testing_support::ForwardingGroup {
 public:
  TellingGroup(std::unique_ptr<Group> inner, std::promise<void>& said)
      : ForwardingGroup(*inner), owned_(std::move(inner)), said_(said) {}
  std::vector<Bytes> all_gather(const Bytes& mine) override {
    said_.set_value();
    return ForwardingGroup::all_gather(mine);
  }

 private:
  std::unique_ptr<Group> owned_;
  std::promise<void>& said_;
};

// A launcher tells each rank about its own host, and hosts may have different numbers of ranks.
TEST(RanksOfHost, ThatWereToldDifferentNumbersAreAnErrorOfAll) {
  std::promise<void> said;
  auto first_has_said = said.get_future();
  run_mesh(2, [&](Mesh& mesh) {
    if (mesh.rank() == 0) {
      auto& group = detail::state_of(mesh)->group;
      group = std::make_unique<TellingGroup>(std::move(group), said);
      setenv("LOCAL_WORLD_SIZE", "1", 1);
    } else {
      ASSERT_EQ(first_has_said.wait_for(std::chrono::seconds(10)), std::future_status::ready);
      setenv("LOCAL_WORLD_SIZE", "2", 1);
    }
    EXPECT_THAT(error_of([&] { static_cast<void>(ranks_of_host(mesh)); }),
                HasSubstr("rank 0 has LOCAL_WORLD_SIZE=1, rank 1 has LOCAL_WORLD_SIZE=2"));
  });
  unsetenv("LOCAL_WORLD_SIZE");
}

// A rank whose module is a unit already tells the others, which are about to make one.
TEST(Sharding, OneRankThatCannotIsAnErrorOfAll) {
  run_mesh(
      2,
      [](Mesh& mesh) {
        Three net;
        fully_shard(net->layers[0], mesh);
        auto other = Three();
        const auto text = error_of(
            [&] { fully_shard(mesh.rank() == 0 ? net->layers[0] : other->layers[0], mesh); });
        EXPECT_THAT(text, HasSubstr(mesh.rank() == 0 ? "already" : "rank 0 could not make a unit"));
      },
      std::chrono::seconds(10));
}

// Two forwards, between which a parameter is frozen, and one backward over both.
TEST(ReplicateFrozen, BetweenTwoForwards) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(nn::Linear(4, 2), 3);
    replicate(net, mesh);
    const auto first = call_module(net, input_of(mesh.rank())).sum();
    net->bias.set_requires_grad(false);
    const auto second = call_module(net, input_of(mesh.rank() + 2)).sum();
    EXPECT_NO_THROW((first + second).backward());
    auto expected = torch::zeros({2, 4});
    for (int rank = 0; rank < 4; ++rank) expected += input_of(rank).sum(0) / 2;
    EXPECT_TRUE(testing::allclose(net->weight.grad(), expected, 1e-5, 1e-5));
  });
}

// One rank failed under NoSync and another in a forward that reduces: afterwards both begin a step.
TEST(DistributedDataParallel, AbandonedStepsBeginAnewOnAllRanks) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Sequential net(nn::Linear(3, 3), nn::BatchNorm1d(3));
    DistributedDataParallel<nn::Sequential> model(net, mesh, {{.uneven_micro_batches = true}});
    const auto step = [&] { model(torch::ones({4, 3}) * (mesh.rank() + 1)).sum().backward(); };
    step();
    {
      std::optional<NoSync> quiet;
      if (mesh.rank() == 0) quiet.emplace(model.module());
      static_cast<void>(model(torch::ones({4, 3})));
    }
    abandon_step(model.module());
    EXPECT_NO_THROW(step());
  });
}

}  // namespace
}  // namespace tessera
