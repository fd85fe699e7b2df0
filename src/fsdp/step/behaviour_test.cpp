// Every way to call a sharded module, the ways around it that must fail, and the life of gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fsdp/testing/test_model.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::Block;
using testing::BlockImpl;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::run_mesh;
using testing::with_values;

// Rows of input for `rank`: every rank has its own, or a peer's ignored gradient would go unseen.
torch::Tensor input_of(int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank);
  return torch::randn({2, kWidth}, generator);
}

// A model of one kind of slot; `path` is how forward calls the blocks.
enum class CallForm { holder, call_impl, torch_holder, list_forward };
struct ModelImpl : nn::Module {
  std::vector<Block> blocks;
  nn::ModuleList list;
  nn::Linear last{nullptr};
  nn::Sequential tail;
  CallForm path = CallForm::holder;
  bool skip_second = false;
  bool fail = false;
  ModelImpl() {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    list = register_module("list", nn::ModuleList());
    list->push_back(Block());
    last = register_module("last", nn::Linear(kWidth, kWidth));
    tail = register_module("tail",
                           nn::Sequential(nn::Linear(kWidth, 5), nn::Tanh(), nn::Linear(5, 1)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = blocks[0](x);
    if (fail) throw std::runtime_error("bad batch");
    if (!skip_second) x = blocks[1](x);
    x = path == CallForm::list_forward ? list[0]->as<BlockImpl>()->forward(x)
                                       : call_module(list->ptr<BlockImpl>(0), x);
    x = path == CallForm::torch_holder ? last(x) : call_module(last, x);
    return tail->forward(x);
  }
};
TESSERA_MODULE(Model);

Model make_model() {
  return with_values(Model(), 3);
}

void shard(Model& model, const Mesh& mesh) {
  for (auto& block : model->blocks) fully_shard(block, mesh);
  fully_shard(model->list->ptr<BlockImpl>(0), mesh);
  fully_shard(model->last, mesh);
  fully_shard(model->tail->ptr<nn::LinearImpl>(0), mesh);
  fully_shard(model, mesh);
}

// Gradients of the mean over all ranks' inputs, by a model that is not sharded.
std::vector<torch::Tensor> whole_gradients(Model& plain, int world, double scale = 1) {
  plain->zero_grad();
  for (int r = 0; r < world; ++r) (scale * plain(input_of(r)).mean() / world).backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : sharded_parameters(plain))
    gradients.push_back(parameter.local.grad());
  return gradients;
}

void expect_gradients(const Model& model, const std::vector<torch::Tensor>& whole) {
  const auto parameters = sharded_parameters(model);
  ASSERT_EQ(parameters.size(), whole.size());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const auto& mine = parameters[i].local.grad();
    ASSERT_EQ(mine.defined(), whole[i].defined()) << parameters[i].name();
    if (!mine.defined()) continue;
    const auto rows = whole[i].narrow(0, parameters[i].offset, parameters[i].local.size(0));
    EXPECT_TRUE(testing::allclose(mine, rows, 1e-5, 1e-7)) << parameters[i].name();
  }
}

template <typename F>
std::string torch_error_of(F&& work) {
  try {
    work();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "no c10::Error";
}

TEST(Calls, HolderCallListAndSequentialSlotsTrainAndEvaluate) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      auto plain = make_model();
      auto model = make_model();
      shard(model, mesh);
      for (int round = 0; round < 2; ++round) {
        {
          const torch::NoGradGuard evaluate;
          // A device's memory is aligned otherwise, and sums of some processors differ by that.
          const at::Tensor found = model(input_of(9)), expected = plain(input_of(9));
          EXPECT_TRUE(found.is_cpu() ? testing::equal(found, expected)
                                     : testing::allclose(found, expected, 1e-5, 1e-6));
          for (const auto& unit : unit_reports(model))
            EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
        }
        const auto whole = whole_gradients(plain, world);
        model->zero_grad();
        model(input_of(mesh.rank())).mean().backward();
        expect_gradients(model, whole);
      }
    });
  }
}

TEST(Calls, SequentialKeepsItsModulesTypes) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_model();
    shard(model, mesh);
    EXPECT_EQ(&model->tail->at<nn::LinearImpl>(0), model->tail->ptr<nn::LinearImpl>(0).get());
    const auto copy = *model->tail->begin();  // an AnyModule is copied with its holder
    EXPECT_EQ(copy.ptr().get(), model->tail->ptr(0).get());
  });
}

TEST(Calls, SequentialAsRoot) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Sequential seq(nn::Linear(kWidth, 4), nn::ReLU(), nn::Linear(4, 2));
    const auto expected = seq->forward(input_of(0)).detach();
    fully_shard(seq->ptr<nn::LinearImpl>(0), mesh);
    fully_shard(seq, mesh);
    auto y = call_module(seq, input_of(0));
    // Ranks drew their own weights: rank r keeps its own rows only, so compare shapes and
    // gradients' presence.
    EXPECT_EQ(y.sizes(), expected.sizes());
    y.sum().backward();
    for (const auto& parameter : sharded_parameters(seq))
      EXPECT_TRUE(parameter.local.grad().defined());
  });
}

TEST(Bypass, IsAnErrorNamingUnitAndFixNeverNumbers) {
  for (const int world : {1, 2}) {
    run_mesh(world, [&](Mesh& mesh) {
      for (const bool train : {true, false}) {
        const torch::AutoGradMode mode(train);
        auto model = make_model();
        shard(model, mesh);
        model->path = CallForm::list_forward;
        auto text = error_of([&] { model(input_of(mesh.rank())); });
        EXPECT_THAT(text, HasSubstr("unit 'list.0'"));
        EXPECT_THAT(text, HasSubstr("tessera::call"));
        abandon_step(model);
        model->path = CallForm::torch_holder;
        EXPECT_THAT(error_of([&] { model(input_of(mesh.rank())); }), HasSubstr("unit 'last'"));
        abandon_step(model);
        // Outside any call that was seen libtorch throws, with the same text.
        model->path = CallForm::holder;
        model(input_of(mesh.rank()));
        EXPECT_THAT(
            torch_error_of([&] { model->blocks[0]->forward(input_of(0).to(mesh.device())); }),
            HasSubstr("unit 'block0'"));
        if (train) continue;  // the root stays gathered for its backward
        EXPECT_THAT(torch_error_of([&] {
                      model->blocks[1]->up->forward(torch::ones({1, kWidth}, mesh.device()));
                    }),
                    HasSubstr("unit 'block1'"));
      }
    });
  }
}

TEST(Bypass, GradientOutsideTheUnitsBackwardIsAnError) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_model();
    shard(model, mesh);
    model(input_of(mesh.rank())).mean().backward();
    unshard(model);
    // Gathered by hand: the numbers are right, but nobody would average the gradient.
    auto y = model->blocks[0]->forward(input_of(0).to(mesh.device()));
    EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("unit 'block0'"));
    abandon_step(model);
  });
}

TEST(Bypass, OptimizerOnTheModulesOwnParametersFails) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_model();
    shard(model, mesh);
    torch::optim::SGD wrong(model->parameters(), 0.1);
    model(input_of(mesh.rank())).mean().backward();
    EXPECT_THAT(torch_error_of([&] { wrong.step(); }), HasSubstr("sharded_parameters"));
  });
}

TEST(Optimizers, AnyOfTorchWorksOnLocalTensors) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    shard(model, mesh);
    torch::optim::SGD expected(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(model)),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int i = 0; i < 3; ++i) {
      whole_gradients(plain, mesh.size());
      expected.step();
      optimizer.zero_grad();
      model(input_of(mesh.rank())).mean().backward();
      optimizer.step();
    }
    const torch::NoGradGuard evaluate;
    EXPECT_TRUE(testing::allclose(model(input_of(5)), plain(input_of(5)), 1e-5, 1e-6));
  });
}

TEST(Gradients, AccumulateWithoutTalkingUntilSync_T5) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    shard(model, mesh);
    const auto whole = whole_gradients(plain, mesh.size(), 3.0);
    set_requires_gradient_sync(model, false);
    for (int i = 0; i < 2; ++i) model(input_of(mesh.rank())).mean().backward();
    for (const auto& unit : unit_reports(model)) EXPECT_EQ(unit.reductions, 0u);
    set_requires_gradient_sync(model, true);
    model(input_of(mesh.rank())).mean().backward();
    for (const auto& unit : unit_reports(model)) EXPECT_EQ(unit.reductions, 1u);
    expect_gradients(model, whole);
    // Three reductions add up to the same.
    model->zero_grad();
    for (int i = 0; i < 3; ++i) model(input_of(mesh.rank())).mean().backward();
    expect_gradients(model, whole);
  });
}

TEST(Gradients, SeveralForwardsBeforeABackward) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    shard(model, mesh);
    const auto whole = whole_gradients(plain, mesh.size(), 2.0);
    const auto a = model(input_of(mesh.rank())).mean();
    const auto b = model(input_of(mesh.rank())).mean();
    (a + b).backward();
    expect_gradients(model, whole);
    // And two backwards of two graphs that were alive together.
    model->zero_grad();
    const auto c = model(input_of(mesh.rank())).mean();
    const auto d = model(input_of(mesh.rank())).mean();
    c.backward();
    d.backward();
    expect_gradients(model, whole);
    // One forward, two backwards (T14).
    model->zero_grad();
    const auto e = model(input_of(mesh.rank())).mean();
    e.backward({}, /*retain_graph=*/true);
    e.backward();
    expect_gradients(model, whole);
  });
}

TEST(Gradients, InputsThatRequireGradientsGetThem) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    shard(model, mesh);
    auto x = input_of(mesh.rank()).requires_grad_();
    auto y = x.detach().clone().requires_grad_();
    model(x).mean().backward();
    plain(y).mean().backward();
    EXPECT_TRUE(testing::allclose(x.grad(), y.grad()));
    expect_gradients(model, whole_gradients(plain, mesh.size()));
  });
}

TEST(Gradients, FrozenAndUnusedParametersHaveNone_T13) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    for (auto* one : {&plain, &model}) {
      (*one)->blocks[0]->up->weight.set_requires_grad(false);
      (*one)->skip_second = true;
    }
    shard(model, mesh);
    for (int round = 0; round < 2; ++round) {
      model->zero_grad();
      model(input_of(mesh.rank())).mean().backward();
      expect_gradients(model, whole_gradients(plain, mesh.size()));
      for (const auto& unit : unit_reports(model)) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
    }
  });
}

TEST(Gradients, ParameterUsedOnOneRankOnlyIsAveragedOverAll) {
  run_mesh(2, [](Mesh& mesh) {
    struct PickImpl : nn::Module {
      torch::Tensor a, b;
      PickImpl() {
        a = register_parameter("a", torch::ones({3}));
        b = register_parameter("b", torch::ones({3}));
      }
      torch::Tensor forward(bool with_b) { return with_b ? (a + b).sum() : a.sum(); }
    };
    auto pick = std::make_shared<PickImpl>();
    fully_shard(pick, mesh);
    call_module(pick, mesh.rank() == 1).backward();
    const auto parameters = sharded_parameters(*pick);
    EXPECT_TRUE(testing::equal(parameters[0].local.grad(), torch::ones_like(parameters[0].local)));
    EXPECT_TRUE(
        testing::equal(parameters[1].local.grad(), torch::full_like(parameters[1].local, 0.5)));
  });
}

TEST(Gradients, ClipEqualsTorch_T10) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      auto plain = make_model();
      auto model = make_model();
      shard(model, mesh);
      for (const double max_norm : {0.01, 1e3}) {
        whole_gradients(plain, world);
        const double expected = nn::utils::clip_grad_norm_(plain->parameters(), max_norm);
        model->zero_grad();
        model(input_of(mesh.rank())).mean().backward();
        const double norm = clip_grad_norm(sharded_parameters(model), max_norm);
        EXPECT_NEAR(norm, expected, 1e-6 * expected);
        std::vector<torch::Tensor> whole;
        for (const auto& parameter : sharded_parameters(plain))
          whole.push_back(parameter.local.grad());
        expect_gradients(model, whole);
      }
    });
  }
}

TEST(Failures, ExceptionInForwardNeedsResetAndThenAllIsWell) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    shard(model, mesh);
    model(input_of(mesh.rank())).mean().backward();
    model->fail = true;
    EXPECT_THROW(model(input_of(mesh.rank())), std::runtime_error);
    model->fail = false;
    EXPECT_THAT(error_of([&] { model(input_of(mesh.rank())); }), HasSubstr("abandon_step"));
    abandon_step(model);
    model(input_of(mesh.rank())).mean().backward();
    expect_gradients(model, whole_gradients(plain, mesh.size()));
  });
}

TEST(Failures, ExceptionInBackwardNeedsResetAndThenAllIsWell) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_model();
    auto model = make_model();
    shard(model, mesh);
    auto y = model(input_of(mesh.rank()));
    y.register_hook([](const torch::Tensor&) { throw std::runtime_error("stop"); });
    EXPECT_THROW(y.mean().backward(), std::runtime_error);
    EXPECT_THAT(error_of([&] { model(input_of(mesh.rank())); }), HasSubstr("abandon_step"));
    abandon_step(model);
    model(input_of(mesh.rank())).mean().backward();
    expect_gradients(model, whole_gradients(plain, mesh.size()));
  });
}

TEST(Failures, StepBetweenForwardAndBackwardIsAnError) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_model();
    shard(model, mesh);
    AdamW optimizer(sharded_parameters(model), {});
    model(input_of(mesh.rank())).mean().backward();
    auto late = model(input_of(mesh.rank())).mean();
    optimizer.step();
    EXPECT_THAT(error_of([&] { late.backward(); }),
                HasSubstr("changed between a forward and its backward"));
  });
}

struct Opaque {
  torch::Tensor inside;
};
struct OpaqueImpl : nn::Module {
  nn::Linear linear{nullptr};
  OpaqueImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
  Opaque forward(const torch::Tensor& x) { return {linear(x)}; }
};
struct TupleImpl : nn::Module {
  nn::Linear linear{nullptr};
  TupleImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
  std::tuple<torch::Tensor, std::vector<torch::Tensor>> forward(
      const std::optional<torch::Tensor>& x, int times) {
    return {linear(*x) * times, {linear(*x)}};
  }
};

TEST(Calls, TensorsAreFoundInTuplesAndAskedForInStructs) {
  run_mesh(2, [](Mesh& mesh) {
    auto opaque = std::make_shared<OpaqueImpl>();
    fully_shard(opaque, mesh);
    EXPECT_THAT(error_of([&] {
                  call_module(opaque, torch::ones({1, 2}));
                }),
                HasSubstr("TensorsOf"));
    auto tuple = std::make_shared<TupleImpl>();
    fully_shard(tuple, mesh, {.reshard_after_forward = true});
    auto [a, list] = call_module(tuple, std::optional<torch::Tensor>(torch::ones({1, 2})), 2);
    EXPECT_EQ(unit_reports(*tuple)[0].gathered_bytes, 0u);
    list[0].sum().backward();
    EXPECT_TRUE(sharded_parameters(*tuple)[0].local.grad().defined());
  });
}

TEST(Sharding, RefusesWhatItCannotShard) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_model();
    shard(model, mesh);
    EXPECT_THAT(error_of([&] { fully_shard(model, mesh); }), HasSubstr("already"));
    struct ScalarImpl : nn::Module {
      ScalarImpl() { register_parameter("s", torch::tensor(1.0f)); }
      torch::Tensor forward() { return {}; }
    };
    EXPECT_THAT(error_of([&] { fully_shard(std::make_shared<ScalarImpl>(), mesh); }),
                HasSubstr("scalar"));
    testing::Net net = testing::make_net({.tied = true, .blocks = 1});
    fully_shard(net->head, mesh);
    EXPECT_THAT(error_of([&] { fully_shard(net, mesh); }), HasSubstr("'embed.weight' is shared"));
    EXPECT_THAT(error_of([&] { fully_shard(nn::Linear(2, 2 + mesh.rank()), mesh); }),
                HasSubstr("other parameters"));
  });
}

TEST(Sharding, CutsAsTorchChunk_T2_T15) {
  run_mesh(4, [](Mesh& mesh) {
    nn::Linear linear(2, 5);
    const auto whole = linear->weight.detach().clone();
    fully_shard(linear, mesh);
    const auto weight = sharded_parameters(linear)[0];
    const std::vector<std::int64_t> rows{2, 2, 1, 0};
    EXPECT_EQ(weight.local.sizes().vec(), (std::vector<std::int64_t>{rows[mesh.rank()], 2}));
    EXPECT_EQ(weight.offset, std::min(2 * mesh.rank(), 5));
    EXPECT_EQ(weight.shape, (std::vector<std::int64_t>{5, 2}));
    EXPECT_TRUE(
        testing::equal(weight.local.detach(), whole.narrow(0, weight.offset, rows[mesh.rank()])));
  });
}

TEST(Sharding, TrainsInBfloat16) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_model();
    model->to(torch::kBFloat16);
    shard(model, mesh);
    AdamW optimizer(sharded_parameters(model), {.lr = 1e-2});
    double first = 0, last = 0;
    for (int i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      auto loss = model(input_of(mesh.rank()).to(torch::kBFloat16)).square().mean();
      loss.backward();
      optimizer.step();
      (i == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, first);
  });
}

}  // namespace
}  // namespace tessera
