// Activation checkpointing: the same numbers, less memory, with and without sharding.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "fsdp/testing/test_model.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::with_values;

// What an intermediate of the last forward became.
struct WitnessImpl : nn::Module {
  nn::Linear up{nullptr}, down{nullptr};
  c10::weak_intrusive_ptr<c10::TensorImpl> hidden;
  int forwards = 0;
  double dropout = 0;
  WitnessImpl() : hidden(c10::intrusive_ptr<c10::TensorImpl>()) {
    up = register_module("up", nn::Linear(6, 9));
    down = register_module("down", nn::Linear(9, 6));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    ++forwards;
    auto h = torch::dropout(torch::gelu(up(x)), dropout, true);
    hidden = c10::weak_intrusive_ptr<c10::TensorImpl>(h.getIntrusivePtr());
    return down(h);
  }
};
TESSERA_MODULE(Witness);

struct CheckpointedStackImpl : nn::Module {
  std::vector<Witness> parts;
  bool checkpointed = false;
  CheckpointedStackImpl() {
    for (int i = 0; i < 3; ++i)
      parts.push_back(register_module("part" + std::to_string(i), Witness()));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& part : parts) x = x + (checkpointed ? activation_checkpoint(part, x) : part(x));
    return x;
  }
};
TESSERA_MODULE(CheckpointedStack);

CheckpointedStack make_stack(bool checkpointed) {
  auto model = with_values(CheckpointedStack(), 5);
  model->checkpointed = checkpointed;
  return model;
}

torch::Tensor stack_input(int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(60 + rank);
  return torch::randn({4, 6}, generator);
}

TEST(Checkpoint, FreesActivationsAndGivesTheSameGradients) {
  auto plain = make_stack(false), model = make_stack(true);
  auto x = stack_input(0).requires_grad_(), y = stack_input(0).requires_grad_();
  auto expected = plain(x).square().sum();
  auto loss = model(y).square().sum();
  EXPECT_FALSE(plain->parts[0]->hidden.expired());
  EXPECT_TRUE(model->parts[0]->hidden.expired());
  expected.backward();
  loss.backward();
  EXPECT_EQ(model->parts[0]->forwards, 2);
  EXPECT_TRUE(testing::equal(loss, expected));
  EXPECT_TRUE(testing::equal(x.grad(), y.grad()));
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(testing::equal(plain->parameters()[i].grad(), model->parameters()[i].grad()));
}

TEST(Checkpoint, DrawsTheSameRandomNumbersAgain) {
  auto plain = make_stack(false), model = make_stack(true);
  for (auto* one : {&plain, &model}) {
    for (auto& part : (*one)->parts) part->dropout = 0.5;
    torch::manual_seed(9);
    (*one)(stack_input(0)).square().sum().backward();
    // What is drawn after a backward does not depend on what it computed again.
    (*one)->parts[0]->dropout = torch::rand({1}).item<double>();
  }
  EXPECT_EQ(plain->parts[0]->dropout, model->parts[0]->dropout);
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(testing::equal(plain->parameters()[i].grad(), model->parameters()[i].grad()));
}

TEST(Checkpoint, ComputesAgainUnderTheSameAutocast) {
  auto model = make_stack(true);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_cache_enabled(false);
  auto y = model(stack_input(0));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  auto plain = make_stack(false);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  auto expected = plain(stack_input(0));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::set_autocast_cache_enabled(true);
  y.sum().backward();
  expected.sum().backward();
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(testing::equal(plain->parameters()[i].grad(), model->parameters()[i].grad()));
}

std::vector<double> losses_under_autocast(CheckpointedStack& model, bool backward_inside) {
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(model)), 0.5);
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) {
    torch::Tensor loss;
    {
      const testing::Autocast on;
      loss = model(stack_input(step)).to(torch::kFloat).square().mean();
      if (backward_inside) loss.backward();
    }
    if (!backward_inside) loss.backward();
    losses.push_back(loss.item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

// The weights of the second forward are not those of the next step.
TEST(Checkpoint, UnderAutocastKeepsNoCastsOfTheSecondForward) {
  for (const bool inside : {false, true}) {
    auto plain = make_stack(false), model = make_stack(true);
    const auto expected = losses_under_autocast(plain, inside);
    EXPECT_EQ(losses_under_autocast(model, inside), expected);
    run_mesh(2, [&](Mesh& mesh) {
      auto sharded = make_stack(true);
      for (auto& part : sharded->parts) fully_shard(part, mesh);
      fully_shard(sharded, mesh);
      // Both ranks compute the same.
      EXPECT_EQ(losses_under_autocast(sharded, inside), expected);
    });
  }
}

// A cast that the first forward made has no history.
TEST(Checkpoint, UnderAutocastGivesAWeightInsideAndOutsideBothGradients) {
  const auto gradient = [](bool checkpointed, bool outside_first) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    auto weight = torch::randn({6, 6}, generator).requires_grad_();
    const auto part = [weight](const torch::Tensor& x) {
      return torch::tanh(torch::linear(torch::linear(x, weight), weight));
    };
    torch::Tensor loss;
    {
      const testing::Autocast on;
      auto x = stack_input(0);
      if (outside_first) x = torch::linear(x, weight);
      x = checkpointed ? activation_checkpoint(part, x) : part(x);
      loss = torch::linear(x * 0.5, weight).to(torch::kFloat).square().mean();
      if (outside_first) loss.backward();
    }
    if (!outside_first) loss.backward();
    return weight.grad();
  };
  for (const bool outside_first : {false, true}) {
    const auto expected = gradient(false, outside_first);
    const auto error = (gradient(true, outside_first) - expected).abs().max().item<double>();
    // The error is that of sums in bfloat16; without a part of the gradient it is ten times as
    // much.
    EXPECT_LT(error, 0.02 * expected.abs().max().item<double>());
  }
}

TEST(Checkpoint, TakesFunctionsAndTuplesAndInputsWithoutGradients) {
  nn::Linear linear(3, 2);
  const auto compute = [&](const torch::Tensor& x, double scale) {
    return std::make_tuple(linear->forward(x) * scale, torch::arange(2), x.detach());
  };
  const auto [y, places, x] = activation_checkpoint(compute, torch::ones({1, 3}), 2.0);
  EXPECT_EQ(places.scalar_type(), at::kLong);
  y.sum().backward();
  EXPECT_TRUE(testing::equal(linear->weight.grad(), torch::full({2, 3}, 2.0f)));
  EXPECT_THROW(y.sum().backward(), std::exception);
  const torch::NoGradGuard evaluate;
  EXPECT_FALSE(
      std::get<0>(activation_checkpoint(compute, torch::ones({1, 3}), 2.0)).requires_grad());
}

TEST(Checkpoint, RefusesAPartThatGivesSomethingElseTheSecondTime) {
  const auto text_of = [](const std::vector<torch::Tensor>& first,
                          const std::vector<torch::Tensor>& second) {
    int calls = 0;
    const auto part = [&](const torch::Tensor& x) {
      std::vector<torch::Tensor> results;
      for (const auto& shape : calls++ == 0 ? first : second)
        results.push_back((x.sum() * torch::ones_like(shape)).to(shape.scalar_type()));
      return results;
    };
    auto x = torch::ones({3}).requires_grad_();
    const auto results = activation_checkpoint(part, x);
    auto text = testing::error_of([&] { results[0].sum().backward(); });
    EXPECT_EQ(calls, 2);
    return text;
  };
  const auto one = torch::ones({3}), other = torch::ones({4, 2}),
             number = torch::ones({3}, torch::kLong);
  const std::vector<torch::Tensor> many(40, one);
  const std::string must = "it must do the same both times";
  EXPECT_EQ(text_of({one, other, number}, {one, other, number}), "no Error");
  EXPECT_NE(text_of({one}, many).find("gave 1 tensors: [3]"), std::string::npos);
  for (const auto& second : {many, {}, {one, other, number}, {other, other}, {number, other}})
    EXPECT_NE(text_of({one, other}, second).find(must), std::string::npos) << second.size();
}

// PyTorch refuses the first two with use_reentrant=True.
TEST(Checkpoint, RefusesWhatItsOwnBackwardWouldGetWrong) {
  auto model = make_stack(true);
  auto x = stack_input(0).requires_grad_();
  const auto loss = [&] { return model(x).square().sum(); };
  const auto text_of = [&](const auto& work) { return testing::error_of(work); };
  const std::string inputs = "backward with `inputs`", graph = "create_graph";
  EXPECT_THAT(text_of([&] { torch::autograd::grad({loss()}, {x}); }), HasSubstr(inputs));
  EXPECT_THAT(text_of([&] { loss().backward({}, std::nullopt, false, {{x}}); }), HasSubstr(inputs));
  EXPECT_THAT(text_of([&] { torch::autograd::grad({loss()}, {x}, {}, true, true); }),
              HasSubstr(inputs));
  EXPECT_THAT(text_of([&] { loss().backward({}, true, true); }), HasSubstr(graph));
  for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  // What does not go through the part is nobody's business.
  auto y = model(x);
  const auto of_y = torch::autograd::grad({y.square().sum()}, {y});
  EXPECT_TRUE(testing::equal(of_y[0], 2 * y));
  loss().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Checkpoint, ComplexResultsHaveGradients) {
  nn::Linear linear(6, 6);
  const auto part = [&](const torch::Tensor& x, const torch::Tensor& turn) {
    const auto spectrum = torch::fft_rfft(linear->forward(x));
    return std::make_tuple(spectrum * turn, spectrum.conj(), torch::arange(2));
  };
  std::vector<std::vector<torch::Tensor>> gradients;
  for (const bool is_checkpointed : {false, true}) {
    linear->zero_grad();
    auto x = stack_input(0).requires_grad_();
    auto turn = torch::polar(torch::ones({4}), torch::arange(4).to(torch::kFloat)).requires_grad_();
    const auto [y, z, places] =
        is_checkpointed ? activation_checkpoint(part, x, turn) : part(x, turn);
    EXPECT_TRUE(y.requires_grad());
    (torch::real(y * z * z).sum() + torch::imag(y).square().sum()).backward();
    gradients.push_back({x.grad(), turn.grad(), linear->weight.grad().clone()});
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    EXPECT_TRUE(testing::equal(gradients[0][i], gradients[1][i])) << i;
}

TEST(Checkpoint, GathersShardedUnitsAgain) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      auto plain = make_stack(false), model = make_stack(true);
      for (auto& part : model->parts) fully_shard(part, mesh);
      fully_shard(model, mesh);
      for (int round = 0; round < 3; ++round) {
        plain->zero_grad();
        for (int r = 0; r < world; ++r) (plain(stack_input(r)).square().sum() / world).backward();
        model->zero_grad();
        model(stack_input(mesh.rank())).square().sum().backward();
        const auto whole = sharded_parameters(plain), mine = sharded_parameters(model);
        for (std::size_t i = 0; i < mine.size(); ++i) {
          const auto rows = whole[i].local.grad().narrow(0, mine[i].offset, mine[i].local.size(0));
          EXPECT_TRUE(testing::allclose(mine[i].local.grad(), rows, 1e-5, 1e-6)) << mine[i].name();
        }
        for (const auto& unit : unit_reports(model)) {
          EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
          if (unit.name.empty()) continue;  // it has no parameters
          EXPECT_EQ(unit.gathers, 2u * (round + 1)) << unit.name;
          EXPECT_EQ(unit.reductions, 1u * (round + 1)) << unit.name;
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera
