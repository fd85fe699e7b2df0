#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/errors.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/ddp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/sync_batchnorm.h"
#include "torch/testing.h"

namespace tessera {

// SyncBatchNorm beside torch::nn::BatchNorm in one process that has the batches of all ranks.

namespace {

namespace nn = torch::nn;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::with_values;

constexpr std::int64_t kChannels = 3;
constexpr int kNormSteps = 3;

// Numbers without a pattern, the same on all ranks, with another mean and spread per channel.
torch::Tensor values(std::vector<std::int64_t> shape, double seed) {
  const auto count = c10::multiply_integers(shape);
  const auto numbers = torch::arange(count, at::kDouble).add(seed).mul(12.9898).sin().mul(43758.5);
  const auto channels = torch::arange(shape[1], at::kDouble);
  std::vector<std::int64_t> along(shape.size(), 1);
  along[1] = -1;
  return (numbers - numbers.floor()).view(shape) * (channels + 1).view(along) +
         (channels * 5).view(along);
}

// How many samples each of the ranks has: one has none, if they are several.
std::vector<std::int64_t> batches(int ranks) {
  const std::vector<std::int64_t> all{3, 0, 5, 1};
  return {all.begin(), all.begin() + ranks};
}
torch::Tensor of_rank(const torch::Tensor& whole, int ranks, int rank) {
  return whole.split_with_sizes(batches(ranks))[rank].clone();
}
torch::Tensor whole_batch(int ranks, std::vector<std::int64_t> shape, double seed) {
  const auto sizes = batches(ranks);
  shape.insert(shape.begin(), std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  return values(std::move(shape), seed);
}

void expect_close(const torch::Tensor& mine, const torch::Tensor& expected, const std::string& what,
                  double tolerance = 1e-10) {
  ASSERT_EQ(mine.defined(), expected.defined()) << what;
  if (!mine.defined()) return;
  EXPECT_EQ(mine.scalar_type(), expected.scalar_type()) << what;
  EXPECT_TRUE(testing::allclose(mine, expected, tolerance, tolerance)) << what << "\n"
                                                                       << mine << "\n"
                                                                       << expected;
}

template <typename Norm>
void give_values(Norm& norm) {
  const torch::NoGradGuard no_grad;
  norm->to(at::kDouble);
  if (!norm->weight.defined()) return;
  norm->weight.copy_(torch::tensor({0.5, -2.0, 1.5}));
  norm->bias.copy_(torch::tensor({1.0, 0.0, -3.0}));
}

// What a few steps and an evaluation gave.
struct Course {
  std::vector<torch::Tensor> outputs, input_gradients;
  torch::Tensor weight_gradient, bias_gradient, mean, variance, batches;
};

template <typename Norm>
Course course_of(Norm& norm, const std::function<torch::Tensor(double seed)>& batch) {
  Course course;
  for (int step = 0; step < kNormSteps; ++step) {
    const auto input = batch(step).set_requires_grad(true);
    const auto output = norm(input);
    (output.pow(3) * batch(step + 10)).sum().backward();
    course.outputs.push_back(output.detach());
    course.input_gradients.push_back(input.grad());
  }
  if (norm->weight.defined()) {
    course.weight_gradient = norm->weight.grad();
    course.bias_gradient = norm->bias.grad();
  }
  course.mean = norm->running_mean;
  course.variance = norm->running_var;
  course.batches = norm->num_batches_tracked;
  return course;
}

// Through shared memory, and through Gloo as between hosts.
class SyncBatchNormTest : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int ranks, const std::function<void(Mesh&)>& body) {
    run_mesh(ranks, body, std::chrono::seconds(20), GetParam());
  }

  template <typename Reference>
  static void compare(int ranks, const std::vector<std::int64_t>& shape,
                      const nn::BatchNormOptions& options) {
    const auto batch = [&](double seed) { return whole_batch(ranks, shape, seed); };
    Reference whole(options);
    give_values(whole);
    const auto expected = course_of(whole, batch);
    whole->eval();
    run(ranks, [&](Mesh& mesh) {
      const auto mine = [&](double seed) { return of_rank(batch(seed), ranks, mesh.rank()); };
      SyncBatchNorm norm(options, mesh);
      give_values(norm);
      const auto course = course_of(norm, mine);
      for (int step = 0; step < kNormSteps; ++step) {
        expect_close(course.outputs[step], of_rank(expected.outputs[step], ranks, mesh.rank()),
                     "output");
        expect_close(course.input_gradients[step],
                     of_rank(expected.input_gradients[step], ranks, mesh.rank()),
                     "gradient of the input");
      }
      if (norm->weight.defined()) {
        auto weight = course.weight_gradient, bias = course.bias_gradient;
        mesh.all_reduce_sum(weight);
        mesh.all_reduce_sum(bias);
        expect_close(weight, expected.weight_gradient, "gradient of the weight");
        expect_close(bias, expected.bias_gradient, "gradient of the bias");
      }
      expect_close(course.mean, expected.mean, "running mean");
      expect_close(course.variance, expected.variance, "running variance");
      expect_close(course.batches, expected.batches, "number of batches");
      if (!options.track_running_stats()) return;
      norm->eval();
      const auto alone = values({2, 3, 2, 2}, mesh.rank()).squeeze();
      expect_close(norm(alone),
                   torch::batch_norm(alone, norm->weight, norm->bias, expected.mean,
                                     expected.variance, false, 0, options.eps(), false),
                   "evaluation");
    });
  }
};

TEST_P(SyncBatchNormTest, IsBatchNormOfAllRanksBatches) {
  for (const int ranks : {1, 2, 4}) {
    const nn::BatchNormOptions options(kChannels);
    compare<nn::BatchNorm1d>(ranks, {kChannels}, options);
    compare<nn::BatchNorm1d>(ranks, {kChannels, 4}, options);
    compare<nn::BatchNorm2d>(ranks, {kChannels, 2, 3}, nn::BatchNormOptions(options).eps(0.3));
    compare<nn::BatchNorm3d>(ranks, {kChannels, 2, 1, 2},
                             nn::BatchNormOptions(options).momentum(0.7));
    compare<nn::BatchNorm2d>(ranks, {kChannels, 2, 3},
                             nn::BatchNormOptions(options).momentum(std::nullopt));
    compare<nn::BatchNorm1d>(ranks, {kChannels, 4}, nn::BatchNormOptions(options).affine(false));
    compare<nn::BatchNorm1d>(ranks, {kChannels, 4},
                             nn::BatchNormOptions(options).track_running_stats(false));
  }
}

// Squares of the values are known to 1e-7 of themselves, which is more than the variance is.
TEST_P(SyncBatchNormTest, KeepsTheVarianceOfValuesFarFromZero) {
  const auto whole = (whole_batch(4, {kChannels, 50}, 1) / 100 + 1000).to(at::kFloat);
  nn::BatchNorm1d expected(kChannels);
  const auto outputs = expected(whole);
  run(4, [&](Mesh& mesh) {
    SyncBatchNorm norm(kChannels, mesh);
    expect_close(norm(of_rank(whole, 4, mesh.rank())), of_rank(outputs, 4, mesh.rank()), "output",
                 1e-2);
    expect_close(norm->running_var, expected->running_var, "running variance", 1e-5);
  });
}

TEST_P(SyncBatchNormTest, TakesLowPrecisionWithWideStatistics) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto whole = (whole_batch(4, {kChannels, 6}, 1) + 20).to(type);
    nn::BatchNorm1d expected(kChannels);
    const auto outputs = expected(whole.to(at::kFloat));
    for (const auto parameters : {at::kFloat, type}) {
      run(4, [&](Mesh& mesh) {
        SyncBatchNorm norm(kChannels, mesh);
        norm->weight.set_data(norm->weight.to(parameters));
        norm->bias.set_data(norm->bias.to(parameters));
        auto input = of_rank(whole, 4, mesh.rank()).set_requires_grad(true);
        const auto output = norm(input);
        expect_close(output, of_rank(outputs, 4, mesh.rank()).to(type), "output", 1e-2);
        expect_close(norm->running_mean, expected->running_mean, "running mean", 1e-6);
        expect_close(norm->running_var, expected->running_var, "running variance", 1e-6);
        output.sum().backward();
        EXPECT_EQ(input.grad().scalar_type(), type);
        EXPECT_EQ(norm->weight.grad().scalar_type(), parameters);
        norm->eval();
        EXPECT_EQ(norm(input).scalar_type(), type);
      });
    }
  }
}

TEST_P(SyncBatchNormTest, EmptyBatchesOnAllRanksLeaveTheStatistics) {
  run(2, [](Mesh& mesh) {
    SyncBatchNorm norm(kChannels, mesh);
    const auto output = norm(torch::zeros({0, kChannels, 2}).set_requires_grad(true));
    EXPECT_EQ(output.numel(), 0);
    output.sum().backward();
    EXPECT_TRUE(testing::equal(norm->running_mean, torch::zeros({kChannels})));
    EXPECT_TRUE(testing::equal(norm->running_var, torch::ones({kChannels})));
    EXPECT_TRUE(testing::equal(norm->weight.grad(), torch::zeros({kChannels})));
  });
}

TEST_P(SyncBatchNormTest, RefusesWhatItCannotDo) {
  for (const int ranks : {1, 2}) {
    run(ranks, [&](Mesh& mesh) {
      SyncBatchNorm norm(kChannels, mesh), without(kChannels);
      EXPECT_EQ(code_of([&] { norm(torch::zeros({kChannels})); }), ErrorCode::invalid_argument);
      EXPECT_THAT(tessera::error_of([&] {
                    norm(torch::zeros({2, 4}));
                  }).what(),
                  HasSubstr("3 channels"));
      EXPECT_THAT(tessera::error_of([&] {
                    without(torch::zeros({2, 3}));
                  }).what(),
                  HasSubstr("no mesh"));
      EXPECT_EQ(norm->num_batches_tracked.item<int>(), 0);
      const auto rows = mesh.rank() == 0 ? 1 : 0;
      EXPECT_THAT(tessera::error_of([&] {
                    norm(torch::zeros({rows, kChannels}));
                  }).what(),
                  HasSubstr("one value per channel"));
      EXPECT_EQ(norm->num_batches_tracked.item<int>(), 0);
      EXPECT_TRUE(testing::equal(norm->running_var, torch::ones({kChannels})));
      without->eval();
      EXPECT_TRUE(testing::equal(without(torch::zeros({2, 3})), torch::zeros({2, 3})));
      if (ranks == 1) return;
      auto input = values({2, kChannels}, 1).to(at::kFloat).set_requires_grad(true);
      const auto loss = norm(input).pow(3).sum();
      EXPECT_EQ(code_of([&] {
                  static_cast<void>(torch::autograd::grad({loss}, {input}, {}, true, true));
                }),
                ErrorCode::unsupported);
    });
  }
}

TEST_P(SyncBatchNormTest, RanksThatDifferAreTold) {
  run(2, [](Mesh& mesh) {
    SyncBatchNorm norm(mesh.rank() + 2, mesh);
    EXPECT_EQ(code_of([&] { norm(torch::zeros({4, mesh.rank() + 2})); }), ErrorCode::mismatch);
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, SyncBatchNormTest, ::testing::Values(true, false));

// A block of two units, with an activation checkpoint if `again`.
template <typename Norm>
struct ConvBlockImpl : nn::Module {
  nn::Conv1d conv{nullptr};
  Norm norm{nullptr};
  ConvBlockImpl(std::int64_t in, Norm made) {
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(in, kChannels, 3).padding(1)));
    nn::init::constant_(conv->bias, 0.5);
    norm = register_module("norm", std::move(made));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::gelu(norm(conv(x))); }
};
template <typename Norm>
TESSERA_MODULE_IMPL(ConvBlock, ConvBlockImpl<Norm>);

template <typename Norm>
struct ConvNetImpl : nn::Module {
  ConvBlock<Norm> first{nullptr}, second{nullptr};
  bool again = false;
  explicit ConvNetImpl(const std::function<Norm()>& make) {
    first = register_module("first", ConvBlock<Norm>(2, make()));
    second = register_module("second", ConvBlock<Norm>(kChannels, make()));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return again ? activation_checkpoint(second, activation_checkpoint(first, x))
                 : second(first(x));
  }
};
template <typename Norm>
TESSERA_MODULE_IMPL(ConvNet, ConvNetImpl<Norm>);

template <typename Norm>
ConvNet<Norm> conv_net(const std::function<Norm()>& make) {
  auto net = with_values(ConvNet<Norm>(make), 3);
  net->to(at::kDouble);
  return net;
}

template <typename Model>
void train_norms(Model& model, torch::optim::Optimizer& optimizer,
                 const std::function<torch::Tensor(double seed)>& batch, double scale) {
  for (int step = 0; step < kNormSteps; ++step) {
    optimizer.zero_grad();
    const auto input = batch(step);
    const auto output = model(input);
    (scale * (output * input.sum(1, true).to(output.device())).pow(2).sum()).backward();
    optimizer.step();
  }
}

std::vector<torch::Tensor> locals_of(ModuleRef module) {
  std::vector<torch::Tensor> locals;
  for (const auto& parameter : sharded_parameters(module)) locals.push_back(parameter.local);
  return locals;
}

enum class NormWay : std::uint8_t { rows, flat, ddp };

class SyncBatchNormTraining : public ::testing::TestWithParam<std::pair<NormWay, bool>> {};

TEST_P(SyncBatchNormTraining, IsThatOfOneProcess) {
  const auto [way, again] = GetParam();
  constexpr int kRanks = 4;
  const auto batch = [](double seed) { return whole_batch(kRanks, {2, 6}, seed); };
  // A checkpoint computes twice, and statistics move on twice: to the square of what is left.
  const double momentum = again ? 1 - std::sqrt(0.9) : 0.1;
  auto whole = conv_net<nn::BatchNorm1d>([] { return nn::BatchNorm1d(kChannels); });
  torch::optim::SGD reference(whole->parameters(), 0.01);
  train_norms(whole, reference, batch, 1);
  const auto expected = full_state_dict(whole);
  run_mesh(kRanks, [&, way = way, again = again](Mesh& mesh) {
    auto net = conv_net<SyncBatchNorm>(
        [&] { return SyncBatchNorm(nn::BatchNormOptions(kChannels).momentum(momentum), mesh); });
    net->again = again;
    const auto mine = [&](double seed) { return of_rank(batch(seed), kRanks, mesh.rank()); };
    // Gradients are averaged over the ranks.
    if (way == NormWay::rows) {
      fully_shard(net->first, mesh);
      fully_shard(net, mesh);
      torch::optim::SGD optimizer(locals_of(net), 0.01);
      train_norms(net, optimizer, mine, kRanks);
    } else if (way == NormWay::flat) {
      FullyShardedDataParallel<ConvNet<SyncBatchNorm>> model(
          net, mesh,
          {.auto_wrap_policy = module_wrap_policy<ConvBlockImpl<SyncBatchNorm>>(),
           .use_orig_params = true});
      torch::optim::SGD optimizer(locals_of(net), 0.01);
      train_norms(model, optimizer, mine, kRanks);
    } else {
      DistributedDataParallel<ConvNet<SyncBatchNorm>> model(net, mesh);
      torch::optim::SGD optimizer(net->parameters(), 0.01);
      train_norms(model, optimizer, mine, kRanks);
    }
    const auto state = full_state_dict(net);
    ASSERT_EQ(state.keys(), expected.keys());
    for (const auto& entry : expected) {
      if (again && entry.key().ends_with("num_batches_tracked")) continue;
      expect_close(state[entry.key()], entry.value(), entry.key(), 1e-9);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, SyncBatchNormTraining,
    ::testing::Values(std::pair{NormWay::rows, false}, std::pair{NormWay::rows, true},
                      std::pair{NormWay::flat, false}, std::pair{NormWay::flat, true},
                      std::pair{NormWay::ddp, false}, std::pair{NormWay::ddp, true}));

TEST(SyncBatchNormPrecision, WorksBelowUnitsThatComputeInBfloat16) {
  for (const bool are_cast : {false, true}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = conv_net<SyncBatchNorm>([&] { return SyncBatchNorm(kChannels, mesh); });
      net->to(at::kFloat);
      MixedPrecision precision{.param_dtype = at::kBFloat16};
      if (are_cast) precision.buffer_dtype = at::kBFloat16;
      fully_shard(net, mesh, {.mixed_precision = precision});
      const auto input = values({mesh.rank() + 2, 2, 5}, 1).to(at::kFloat);
      const auto output = net(input);
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      output.sum().backward();
      auto mean = net->second->norm->running_mean.to(at::kDouble);
      EXPECT_GT(mean.abs().max().item<double>(), 0);
      auto sum = mean.clone();
      mesh.all_reduce_sum(sum);
      EXPECT_TRUE(testing::equal(sum, mean * 2));  // the same on both
      net->eval();
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(net(input).scalar_type(), at::kBFloat16);
    });
  }
}

// One that fits into another one.
struct NormPartImpl : nn::SequentialImpl {
  using nn::SequentialImpl::SequentialImpl;
  torch::Tensor forward(torch::Tensor x) { return nn::SequentialImpl::forward(std::move(x)); }
};
TORCH_MODULE(NormPart);

// A Sequential in a class of a user's, which forward calls by a member.
struct NormStackImpl : nn::Module {
  nn::Sequential layers;
  SyncBatchNorm last{nullptr};
  NormStackImpl() {
    const nn::BatchNorm1d shared(kChannels);
    const NormPart inner(nn::BatchNorm1d(nn::BatchNormOptions(kChannels).momentum(0.5)));
    layers = nn::Sequential(nn::Linear(2, kChannels), shared, inner, shared);
    register_module("layers", layers);
    last = register_module("last", SyncBatchNorm(kChannels));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(layers->forward(x)); }
};
TESSERA_MODULE(NormStack);

TEST(ConvertSyncBatchNorm, ExchangesEntriesOfSequentials) {
  const auto whole = values({8, 2}, 1).to(at::kFloat);
  const auto model = [] { return with_values(NormStack(), 5); };
  auto expected = model();
  convert_sync_batchnorm(expected, Mesh());
  const auto outputs = expected(whole);
  run_mesh(2, [&](Mesh& mesh) {
    auto stack = model();
    stack->layers->ptr(1)->eval();
    stack->layers->ptr(1)->named_parameters()["bias"].set_requires_grad(false);
    const auto before = stack->named_parameters(), buffers = stack->named_buffers();
    convert_sync_batchnorm(stack, mesh);
    const auto after = stack->named_parameters(), buffers_after = stack->named_buffers();
    ASSERT_EQ(after.keys(), before.keys());
    ASSERT_EQ(buffers_after.keys(), buffers.keys());
    for (const auto& entry : before)
      EXPECT_TRUE(after[entry.key()].is_same(entry.value())) << entry.key();
    for (const auto& entry : buffers)
      EXPECT_TRUE(buffers_after[entry.key()].is_same(entry.value())) << entry.key();
    auto* norm = stack->layers->ptr(1)->as<SyncBatchNorm>();
    ASSERT_NE(norm, nullptr);
    EXPECT_FALSE(norm->is_training());
    EXPECT_TRUE(norm->weight.requires_grad());
    EXPECT_FALSE(norm->bias.requires_grad());
    EXPECT_EQ(stack->layers->ptr(3).get(), norm);
    auto* inner = stack->layers->ptr(2)->as<NormPart>();
    ASSERT_NE(inner->ptr(0)->as<SyncBatchNorm>(), nullptr);
    EXPECT_EQ(inner->ptr(0)->as<SyncBatchNorm>()->options.momentum(), 0.5);
    stack->train();
    fully_shard(stack, mesh);
    const auto half = whole.chunk(2)[mesh.rank()];
    expect_close(stack(half), outputs.chunk(2)[mesh.rank()], "output", 1e-5);
  });
}

struct OwnNormImpl : nn::BatchNorm1dImpl {
  using nn::BatchNorm1dImpl::BatchNorm1dImpl;
  torch::Tensor forward(const torch::Tensor& x) { return nn::BatchNorm1dImpl::forward(x) + 1; }
};
TORCH_MODULE(OwnNorm);

// A Sequential that has a member beside its slots.
struct WithMemberImpl : nn::SequentialImpl {
  nn::BatchNorm1d norm{nullptr};
  WithMemberImpl() : nn::SequentialImpl(nn::Linear(2, 2)) {
    norm = register_module("norm", nn::BatchNorm1d(2));
  }
};
TORCH_MODULE(WithMember);

TEST(ConvertSyncBatchNorm, NamesWhatItCannotExchangeAndChangesNothing) {
  const Mesh mesh;
  NormPart good(nn::BatchNorm1d(2));
  ConvNet<nn::BatchNorm1d> members([] { return nn::BatchNorm1d(kChannels); });
  nn::Sequential net(good, members);
  const auto error = tessera::error_of([&] { convert_sync_batchnorm(net, mesh); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_EQ(error.key(), "1.first.norm");
  EXPECT_THAT(error.what(), HasSubstr("1 more"));
  EXPECT_NE(good->ptr(0)->as<nn::BatchNorm1d>(), nullptr);
  EXPECT_NE(good->named_children()["0"]->as<nn::BatchNorm1d>(), nullptr);

  const nn::Sequential own(OwnNorm(2));
  EXPECT_EQ(tessera::error_of([&] { convert_sync_batchnorm(own, mesh); }).key(), "0");
  const nn::BatchNorm1d alone(2);
  EXPECT_EQ(code_of([&] { convert_sync_batchnorm(alone, mesh); }), ErrorCode::unsupported);
  const nn::ModuleList list(nn::BatchNorm1d(2));
  EXPECT_EQ(tessera::error_of([&] { convert_sync_batchnorm(list, mesh); }).key(), "0");

  const WithMember derived;
  EXPECT_EQ(tessera::error_of([&] { convert_sync_batchnorm(derived, mesh); }).key(), "norm");

  const nn::Sequential sharded(nn::BatchNorm1d(2));
  fully_shard(sharded, mesh);
  EXPECT_EQ(code_of([&] { convert_sync_batchnorm(sharded, mesh); }), ErrorCode::invalid_argument);
}

TEST(SyncBatchNormModule, HasTheNamesOfBatchNormAndCopiesOfItsOwn) {
  SyncBatchNorm norm(nn::BatchNormOptions(2).affine(false), Mesh());
  EXPECT_THAT(full_state_dict(norm).keys(),
              ElementsAre("running_mean", "running_var", "num_batches_tracked"));
  norm = SyncBatchNorm(2, Mesh());
  EXPECT_EQ(full_state_dict(norm).keys(), full_state_dict(nn::BatchNorm1d(2)).keys());
  norm(torch::tensor({{1.0F, 2.0F}, {3.0F, 5.0F}}));
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  EXPECT_TRUE(testing::equal(copy->running_mean, norm->running_mean));
  EXPECT_FALSE(copy->running_mean.is_same(norm->running_mean));
  copy->forward(torch::ones({2, 2}));
  EXPECT_EQ(copy->num_batches_tracked.item<int>(), 2);
  EXPECT_EQ(norm->num_batches_tracked.item<int>(), 1);
  EXPECT_EQ(c10::str(*norm),
            "tessera::SyncBatchNorm(2, eps=1e-05, momentum=0.1, affine=true, "
            "track_running_stats=true)");
}

}  // namespace
}  // namespace tessera
