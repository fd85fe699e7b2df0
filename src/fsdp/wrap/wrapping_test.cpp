// Ways to make and call units that used to end in a model that could not be used any more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

TEST(Wrapping, OutsideInSaysThatTheOrderIsInsideOut) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    fully_shard(net, mesh);
    const auto text = error_of([&] { fully_shard(net->blocks[0], mesh); });
    EXPECT_THAT(text, HasSubstr("the order is inside out"));
    EXPECT_THAT(text, HasSubstr("NetImpl"));
    EXPECT_THAT(text, HasSubstr("'norm.weight'"));
  });
}

// One step of `net` beside one of a model that is whole.
void expect_whole_gradients(Net& net, const Mesh& mesh) {
  auto plain = make_net({});
  loss_of(plain, batch(0, 0, mesh.size())).backward();
  loss_of(net, batch_of(0, 0, mesh)).backward();
  const auto expected = sharded_parameters(plain);
  const auto parameters = sharded_parameters(net);
  ASSERT_EQ(parameters.size(), expected.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& mine = parameters[i].local.grad();
    ASSERT_TRUE(mine.defined()) << parameters[i].name();
    const auto whole = expected[i].local.grad();
    const auto part =
        parameters[i].sharded ? whole.narrow(0, parameters[i].offset, mine.size(0)) : whole;
    EXPECT_TRUE(testing::allclose(mine, part, 1e-4, 1e-6)) << parameters[i].name();
  }
}

TEST(Wrapping, AUnitThatWasCalledBeforeItsModelJoinsIt) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    const auto x = torch::ones({2, kWidth});
    {
      const torch::NoGradGuard no_grad;
      net->blocks[0](x);
    }
    net->blocks[1](x).sum().backward();
    static_cast<void>(net->blocks[2](x));  // no backward comes
    for (auto& parameter : sharded_parameters(net))
      parameter.local.mutable_grad() = torch::Tensor();
    net->zero_grad();
    expect_whole_gradients(net, mesh);
  });
}

// What is the only unit of its model sends its buckets early, which one of several may not.
TEST(Wrapping, AReplicatedUnitThatWasCalledBeforeItsModelJoinsIt) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    for (auto& block : net->blocks) replicate(block, mesh);
    replicate(net, mesh);
    net->blocks[1](torch::ones({2, kWidth})).sum().backward();
    net->zero_grad();
    expect_whole_gradients(net, mesh);
  });
}

TEST(Wrapping, AUnitThatFailedBeforeItsModelRanNeedsAReset) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    EXPECT_THROW(net->blocks[1](torch::ones({2, kWidth + 1})), c10::Error);
    EXPECT_THAT(error_of([&] { loss_of(net, batch_of(0, 0, mesh)); }),
                ::testing::AllOf(HasSubstr("'block1'"), HasSubstr("tessera::abandon_step(model)")));
    abandon_step(net);
    expect_whole_gradients(net, mesh);
  });
}

struct ReaderImpl : nn::Module {
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear head{nullptr};
  ReaderImpl() {
    const auto layer = nn::TransformerEncoderLayer(
        nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0));
    encoder = register_module("encoder", nn::TransformerEncoder(layer, 2));
    head = register_module("head", nn::Linear(8, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return call_module(head, call_module(encoder, x));
  }
};
TESSERA_MODULE(Reader);

TEST(Wrapping, LayersThatATransformerCallsByItselfAreRefusedByName) {
  run_mesh(2, [](Mesh& mesh) {
    Reader reader;
    for (std::size_t i = 0; i < 2; ++i)
      fully_shard(reader->encoder->layers->ptr<nn::TransformerEncoderLayerImpl>(i), mesh);
    const auto text = error_of([&] { fully_shard(reader, mesh); });
    EXPECT_THAT(text, HasSubstr("'encoder.layers.0'"));
    EXPECT_THAT(text, HasSubstr("TransformerEncoderImpl calls it by itself"));

    FullyShardedOptions options;
    options.auto_wrap_policy = module_wrap_policy<nn::TransformerEncoderLayerImpl>();
    EXPECT_THAT(error_of([&] { FullyShardedDataParallel<Reader>(Reader(), mesh, options); }),
                HasSubstr("'encoder.layers.0'"));
  });
}

TEST(Wrapping, PoliciesBySizePassOverWhatATransformerCalls) {
  run_mesh(2, [](Mesh& mesh) {
    for (const auto& policy : {size_based_auto_wrap_policy(1), always_wrap_policy()}) {
      FullyShardedOptions options;
      options.auto_wrap_policy = policy;
      FullyShardedDataParallel<Reader> reader(testing::with_values(Reader(), 3), mesh, options);
      const auto units = fsdp_modules(reader.module());
      EXPECT_EQ(units.size(), 3U);  // itself, the encoder, the head
      reader(torch::ones({4, 2, 8})).sum().backward();
      for (const auto& parameter : reader.parameters())
        EXPECT_TRUE(parameter.local.grad().defined()) << parameter.name();
    }
  });
}

// A class that no policy by size has heard of.
struct ScaleImpl : nn::Module {
  torch::Tensor by;
  nn::Linear inner{nullptr};
  ScaleImpl() {
    by = register_parameter("by", torch::ones({6}));
    inner = register_module("inner", nn::Linear(6, 6));
  }
  torch::Tensor forward(const torch::Tensor& x) { return call_module(inner, x) * by; }
};
TESSERA_MODULE(Scale);

// Nobody knows the type of a subclass either.
struct OwnLinearImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
};
TORCH_MODULE(OwnLinear);

struct SlotsImpl : nn::Module {
  nn::Sequential body;
  SlotsImpl() {
    body = register_module(
        "body", nn::Sequential(nn::Conv1d(nn::Conv1dOptions(2, 4, 3)), nn::BatchNorm1d(4),
                               nn::Tanh(), nn::Flatten(), nn::Linear(12, 6), Scale(),
                               nn::LayerNorm(nn::LayerNormOptions({6})), OwnLinear(6, 2)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return call_module(body, x); }
};
TESSERA_MODULE(Slots);

TEST(Wrapping, PoliciesBySizeTakeOfASequentialWhatItCallsAsUnits) {
  const auto input = torch::arange(40.0).sin().reshape({4, 2, 5});
  auto alone = testing::with_values(Slots(), 3);
  alone(input).square().mean().backward();
  run_mesh(2, [&](Mesh& mesh) {
    for (const auto& policy : {size_based_auto_wrap_policy(1), always_wrap_policy()}) {
      FullyShardedDataParallel<Slots> net(testing::with_values(Slots(), 3), mesh,
                                          {.auto_wrap_policy = policy, .use_orig_params = true});
      std::vector<std::string> units;
      for (const auto& unit : unit_reports(*net.module())) {
        if (unit.parameters > 0) units.push_back(unit.name);
      }
      // body.7 and the numbers of body.5 are of the unit around them.
      EXPECT_THAT(units, ::testing::ElementsAre("body", "body.0", "body.1", "body.4",
                                                "body.5.inner", "body.6"));
      net(input).square().mean().backward();
      const auto named = alone->named_parameters();
      for (const auto& parameter : net.parameters()) {
        if (parameter.local.numel() == 0) continue;
        const auto expected = named[parameter.name()].grad().reshape({-1}).narrow(
            0, parameter.offset, parameter.local.numel());
        EXPECT_TRUE(
            testing::allclose(parameter.local.grad().clone().reshape({-1}), expected, 1e-5, 1e-6))
            << parameter.name();
      }
    }
  });
}

// libtorch's own holder calls its module past everybody.
struct PlainImpl : nn::Module {
  nn::Linear fc{nullptr};
  PlainImpl() { fc = register_module("fc", nn::Linear(8, 3)); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x); }
};
TESSERA_MODULE(Plain);

TEST(Wrapping, AUnitOfAPolicyThatIsCalledPastItNamesThePolicy) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Plain> net(Plain(), mesh, {.auto_wrap_policy = always_wrap_policy()});
    EXPECT_THAT(error_of([&] {
                  net(torch::ones({2, 8}));
                }),
                ::testing::AllOf(HasSubstr("'fc'"), HasSubstr("auto_wrap_policy")));
  });
}

TEST(Wrapping, OutputDtypeOfFsdp1IsTheModelsAlone) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedOptions options;
    options.auto_wrap_policy = module_wrap_policy<testing::BlockImpl>();
    options.mixed_precision.param_dtype = torch::kBFloat16;
    options.mixed_precision.output_dtype = torch::kDouble;
    FullyShardedDataParallel<Net> net(make_net({}), mesh, options);
    const auto result = net(batch_of(0, 0, mesh));
    EXPECT_EQ(result.scalar_type(), torch::kDouble);
    result.sum().backward();
  });
}

}  // namespace
}  // namespace tessera
