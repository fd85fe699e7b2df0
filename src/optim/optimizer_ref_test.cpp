#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "base/testing.h"
#include "conformance/errors.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/lr_scheduler.h"
#include "tessera/optim.h"
#include "tessera/optimizer_ref.h"
#include "torch/tensor.h"
#include "torch/testing.h"
#include "value/render.h"

namespace tessera {

// The state of torch::optim's optimizers beside that of torch.optim's, which
// tests/golden/make/optimizers.py wrote.

namespace {

using ::testing::HasSubstr;

torch::Tensor values(int step, at::IntArrayRef shape) {
  std::vector<float> made;
  for (std::int64_t i = 0; i < c10::multiply_integers(shape); ++i)
    made.push_back(static_cast<float>(std::sin(1.0 + 10 * step + static_cast<double>(i))));
  return torch::tensor(made).reshape(shape);
}

torch::Tensor values_like(int step, const torch::Tensor& like) {
  if (!like.is_complex()) return values(step, like.sizes());
  return torch::complex(values(step, like.sizes()), values(step + 20, like.sizes()));
}

struct Training {
  std::vector<torch::Tensor> params;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  void steps(int first, int count) const {
    for (int step = first; step < first + count; ++step) {
      optimizer->step([&] {
        for (const auto& p : params) p.mutable_grad() = values(step, p.sizes()) + 0.1 * p.detach();
        return torch::tensor(1.0F);
      });
    }
  }
};

template <typename Optimizer, typename Options>
Training make(Options options) {
  Training made;
  for (const auto& shape : {std::vector<std::int64_t>{3, 2}, {4}})
    made.params.push_back(values(0, shape).requires_grad_());
  if constexpr (std::is_same_v<Options, torch::optim::LBFGSOptions>) {
    made.optimizer = std::make_unique<Optimizer>(made.params, options);
  } else {
    auto second = std::make_unique<Options>(options);
    second->weight_decay(0.25);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector{made.params[0]}, std::make_unique<Options>(options));
    groups.emplace_back(std::vector{made.params[1]}, std::move(second));
    made.optimizer = std::make_unique<Optimizer>(groups, options);
  }
  return made;
}

Training make(const std::string& kind) {
  using namespace torch::optim;  // NOLINT(*-using-namespace*)
  if (kind == "Adam") return make<Adam>(AdamOptions(0.02).betas({0.8, 0.95}).amsgrad(true));
  if (kind == "AdamW")
    return make<torch::optim::AdamW>(torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  if (kind == "SGD") return make<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true));
  if (kind == "SGD without momentum") return make<SGD>(SGDOptions(0.1));
  if (kind == "Adagrad")
    return make<Adagrad>(AdagradOptions(0.1).lr_decay(0.01).initial_accumulator_value(0.5));
  if (kind == "RMSprop") return make<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true));
  return make<LBFGS>(LBFGSOptions(0.5).max_iter(2).history_size(3));
}

Value golden(const std::string& kind) {
  static const Value all =
      Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/optimizers.pt").load();
  return all.at(kind);
}

void expect_near(const Value& ours, const Value& theirs, const std::string& path) {
  const auto is_number = [](const Value& v) {
    return v.is(Value::Kind::real) || v.is(Value::Kind::integer);
  };
  if (is_number(theirs)) {
    ASSERT_TRUE(is_number(ours)) << path;
    EXPECT_NEAR(ours.as_real(), theirs.as_real(), 1e-6) << path;
    return;
  }
  ASSERT_EQ(ours.kind(), theirs.kind()) << path;
  if (theirs.is(Value::Kind::tensor)) {
    const auto a = tensor_of(ours.as_tensor()), b = tensor_of(theirs.as_tensor());
    ASSERT_EQ(a.dtype(), b.dtype()) << path;
    ASSERT_EQ(a.sizes(), b.sizes()) << path;
    EXPECT_TRUE(torch::allclose(a, b, 1e-5, 1e-6)) << path << "\n" << a << "\n" << b;
  } else if (theirs.is(Value::Kind::dict)) {
    ASSERT_EQ(ours.size(), theirs.size()) << path;
    // In any order: in Python that of a group's options depends on which of them were given.
    for (const auto& [key, value] : theirs.pairs()) {
      const auto name = path + "." + render(key);
      const auto found = std::ranges::find_if(
          ours.pairs(), [&, wanted = key](const auto& pair) { return pair.first == wanted; });
      ASSERT_NE(found, ours.pairs().end()) << name;
      expect_near(found->second, value, name);
    }
  } else if (theirs.is(Value::Kind::list) || theirs.is(Value::Kind::tuple)) {
    ASSERT_EQ(ours.size(), theirs.size()) << path;
    for (std::size_t i = 0; i < theirs.size(); ++i)
      expect_near(ours.items()[i], theirs.items()[i], path + "." + std::to_string(i));
  } else {
    EXPECT_TRUE(ours == theirs) << path;
  }
}

class OptimizerState : public ::testing::TestWithParam<std::string> {};

// Keys, dtypes and shapes are PyTorch's (spec L-1).
TEST_P(OptimizerState, IsPythons) {
  const auto training = make(GetParam());
  training.steps(1, 3);
  const auto expected = golden(GetParam());
  expect_near(optimizer_state_dict(*training.optimizer), expected.at("state"), "state");
  for (std::size_t i = 0; i < training.params.size(); ++i)
    expect_near(leaf_of(training.params[i].detach()), expected.at("params").items()[i], "params");
}

TEST_P(OptimizerState, OfPythonIsLoadedAndGoesOn) {
  const auto expected = golden(GetParam());
  const auto training = make(GetParam());
  training.steps(7, 1);  // another state, which is replaced
  for (std::size_t i = 0; i < training.params.size(); ++i) {
    const torch::NoGradGuard no_grad;
    training.params[i].copy_(tensor_of(expected.at("params").items()[i].as_tensor()));
  }
  load_optimizer_state_dict(*training.optimizer, expected.at("state"));
  expect_near(optimizer_state_dict(*training.optimizer), expected.at("state"), "state");
  training.steps(4, 2);
  for (std::size_t i = 0; i < training.params.size(); ++i)
    expect_near(leaf_of(training.params[i].detach()), expected.at("later").items()[i], "later");
}

INSTANTIATE_TEST_SUITE_P(Of, OptimizerState,
                         ::testing::Values("Adam", "AdamW", "SGD", "SGD without momentum",
                                           "Adagrad", "RMSprop", "LBFGS"),
                         [](const auto& of) {
                           return of.param.substr(0, of.param.find(' ')) +
                                  (of.param.find(' ') == std::string::npos ? "" : "Plain");
                         });

Value with_state(const Value& tree, const char* name, const Value& value) {
  auto first = Value::dict(tree.at("state").pairs().front().second.pairs());
  first.set_item(name, value);
  auto states = Value::dict(tree.at("state").pairs());
  states.set_item(tree.at("state").pairs().front().first, first);
  return Value::dict({{"state", states}, {"param_groups", tree.at("param_groups")}});
}

Value with_option(const Value& tree, const char* name, const Value& value) {
  auto groups = tree.at("param_groups").items();
  auto group = Value::dict(groups.back().pairs());
  group.set_item(name, value);
  groups.back() = group;
  return Value::dict({{"state", tree.at("state")}, {"param_groups", Value::list(groups)}});
}

// What cannot be loaded changes nothing.
TEST(OptimizerStateErrors, LeaveTheOptimizerAsItWas) {
  const auto training = make("Adam");
  training.steps(1, 2);
  const auto before = optimizer_state_dict(*training.optimizer);
  const auto other = make("Adam");
  other.steps(5, 3);
  const auto given = optimizer_state_dict(*other.optimizer);
  const auto refused = [&](const Value& tree) {
    const auto text =
        testing::error_of([&] { load_optimizer_state_dict(*training.optimizer, tree); });
    expect_near(optimizer_state_dict(*training.optimizer), before, "unchanged");
    return text;
  };
  EXPECT_THAT(refused(Value::dict({{"state", given.at("state")}})), HasSubstr("param_groups"));
  EXPECT_THAT(refused(with_option(given, "maximize", true)), HasSubstr("maximize"));
  EXPECT_THAT(refused(with_option(given, "params", Value::list({Value(1), Value(2)}))),
              HasSubstr("doesn't match the size of optimizer's group"));
  EXPECT_THAT(refused(with_state(given, "exp_avg", leaf_of(torch::zeros({2})))),
              HasSubstr("the state has shape [2], the optimizer's parameter [3, 2]"));
  EXPECT_THAT(refused(with_state(given, "step", Value("three"))), HasSubstr("mismatch"));
  auto groups = given.at("param_groups").items();
  groups.pop_back();
  EXPECT_THAT(
      refused(Value::dict({{"state", given.at("state")}, {"param_groups", Value::list(groups)}})),
      HasSubstr("different number of parameter groups"));
}

// Every option that changes the arithmetic is compared, for each optimizer.
TEST(OptimizerStateErrors, NoOptionThatCountsIsPassedOver) {
  const auto refused = [](const OptimizerRef& optimizer, const char* name, const Value& value) {
    const auto given = optimizer_state_dict(optimizer);
    EXPECT_THAT(testing::error_of(
                    [&] { load_optimizer_state_dict(optimizer, with_option(given, name, value)); }),
                HasSubstr(name));
  };
  for (const std::string kind : {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop"}) {
    SCOPED_TRACE(kind);
    const auto training = make(kind);
    refused(*training.optimizer, "maximize", true);
    if (kind.starts_with("Adam"))
      refused(*training.optimizer, "decoupled_weight_decay", kind == "Adam");
  }
  SCOPED_TRACE("tessera::AdamW");
  ShardedParameter parameter;
  parameter.names = {"p"};
  parameter.shape = {3, 2};
  parameter.local = values(0, {3, 2}).requires_grad_();
  AdamW own({parameter});
  refused(own, "maximize", true);
  refused(own, "amsgrad", true);
  refused(own, "decoupled_weight_decay", false);
}

TEST(OptimizerStateErrors, SayWhatIsNotKept) {
  const auto training = make("Adam");
  training.steps(1, 1);
  const auto tree = with_option(optimizer_state_dict(*training.optimizer), "initial_lr", 0.5);
  EXPECT_THAT(
      testing_support::warnings_of([&] { load_optimizer_state_dict(*training.optimizer, tree); }),
      ::testing::Contains(HasSubstr("'initial_lr'")));
}

// tessera::AdamW beside Python's; `sharded`: its states lie in one array for each shard.
void expect_pythons(const std::string& kind, const std::vector<torch::Tensor>& params,
                    bool sharded) {
  std::vector<ParameterGroup> groups;
  for (const auto& p : params) {
    ShardedParameter parameter;
    parameter.names = {"p"};
    parameter.shape = p.sizes().vec();
    parameter.local = p;
    parameter.sharded = sharded;
    groups.push_back({{parameter}, {.lr = 0.02, .weight_decay = groups.empty() ? 0.1 : 0.25}});
  }
  AdamW optimizer(groups);
  const auto steps = [&](int first, int count) {
    for (int step = first; step < first + count; ++step) {
      for (const auto& p : params) p.mutable_grad() = values_like(step, p) + 0.1 * p.detach();
      optimizer.step();
    }
  };
  EXPECT_EQ(optimizer_state_dict(optimizer).at("state").size(), 0U);
  steps(1, 3);
  const auto expected = golden(kind);
  expect_near(optimizer_state_dict(optimizer), expected.at("state"), "state");
  for (std::size_t i = 0; i < params.size(); ++i)
    expect_near(leaf_of(params[i].detach()), expected.at("params").items()[i], "params");
  steps(9, 1);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const torch::NoGradGuard no_grad;
    params[i].copy_(tensor_of(expected.at("params").items()[i].as_tensor()));
  }
  load_optimizer_state_dict(optimizer, expected.at("state"));
  steps(4, 2);
  for (std::size_t i = 0; i < params.size(); ++i)
    expect_near(leaf_of(params[i].detach()), expected.at("later").items()[i], "later");
}

TEST(OptimizerStateOwn, OfAdamWHereIsThatOfPython) {
  for (const bool sharded : {false, true}) expect_pythons("AdamW", make("AdamW").params, sharded);
}

// 47, 4.6: as Python counts a complex number, as two.
TEST(OptimizerStateOwn, OfComplexParametersIsThatOfPython) {
  const auto complex = torch::zeros({3, 2}, torch::kComplexFloat);
  const auto of = [](const torch::Tensor& tensor) { return tensor.requires_grad_(); };
  for (const bool sharded : {false, true}) {
    expect_pythons("AdamW complex", {of(values_like(0, complex)), of(values(0, {4}))}, sharded);
    // Turned: updated through copies.
    expect_pythons("AdamW complex",
                   {of(values_like(0, complex).t().contiguous().t()), of(values(0, {4}))}, false);
  }
}

// An optimizer of one's own, with a field that its description may forget.
struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  TORCH_ARG(double, lr) = 0.5;

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", torch::IValue(lr()));
  }
};
struct OwnState : torch::optim::OptimizerCloneableParamState<OwnState> {
  TORCH_ARG(std::int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, sum);

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", torch::IValue(step()));
    if (sum().defined()) archive.write("sum", torch::IValue(sum()));
  }
};
template <int kNumber>  // each test has its own type
class OwnOptimizer : public torch::optim::Optimizer {
 public:
  explicit OwnOptimizer(std::vector<torch::Tensor> params)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))},
                  std::make_unique<OwnOptions>()) {}
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (const auto& p : param_groups()[0].params()) {
      auto& state = state_[p.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<OwnState>();
      auto& own = static_cast<OwnState&>(*state);
      own.step(own.step() + 1);
      own.sum(own.sum().defined() ? own.sum() + p.grad() : p.grad().clone());
    }
    return {};
  }
};

// Its state lies in arrays that stay when it is forgotten.
TEST(OptimizerStateOwn, WhatIsForgottenBeginsAtZero) {
  const auto train = [](bool forgets) {
    ShardedParameter parameter;
    parameter.names = {"p"};
    parameter.shape = {3, 2};
    parameter.local = values(0, {3, 2}).requires_grad_();
    AdamW optimizer({parameter}, {.lr = 0.1});
    const auto step = [&](int number) {
      parameter.local.mutable_grad() = values(number, {3, 2});
      optimizer.step();
    };
    if (forgets) {
      step(7);
      optimizer.set_state(0, 0, {});
      const torch::NoGradGuard no_grad;
      parameter.local.copy_(values(0, {3, 2}));
    }
    step(1);
    step(2);
    return parameter.local.detach();
  };
  EXPECT_TRUE(torch::equal(train(true), train(false)));
}

// As torch.optim's: what is frozen is in its group and has no state until it trains.
TEST(OptimizerStateOwn, OfFrozenParametersIsNotMade) {
  ShardedParameter frozen;
  frozen.names = {"p"};
  frozen.shape = {3, 2};
  frozen.local = values(0, {3, 2});
  AdamW optimizer({frozen});
  optimizer.make_state();
  EXPECT_FALSE(optimizer.state(0, 0).defined());
  frozen.local.requires_grad_();
  optimizer.make_state();
  EXPECT_TRUE(optimizer.state(0, 0).defined());
}

// A load fills it in place, and gives it back as views.
TEST(OptimizerStateOwn, StateInItsOwnMemoryIsNotCopied) {
  ShardedParameter parameter;
  parameter.names = {"p"};
  parameter.shape = {3, 2};
  parameter.local = values(0, {3, 2}).requires_grad_();
  AdamW optimizer({parameter});
  optimizer.make_state();
  const auto& state = optimizer.state(0, 0);
  const auto view_of = [](const at::Tensor& tensor) {
    return torch::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
  };
  const auto version = state.exp_avg._version();
  optimizer.set_state(0, 0, {state.step, view_of(state.exp_avg), view_of(state.exp_avg_sq)});
  EXPECT_EQ(state.exp_avg._version(), version);
  optimizer.set_state(0, 0, {state.step, values(7, {3, 2}), view_of(state.exp_avg_sq)});
  EXPECT_TRUE(torch::equal(state.exp_avg, values(7, {3, 2})));
}

TEST(OwnOptimizers, AreDescribedByTheirFields) {
  using Own = OwnOptimizer<1>;
  const auto p = torch::ones({2}).requires_grad_();
  p.mutable_grad() = torch::full({2}, 3.0F);
  Own optimizer({p});
  EXPECT_THAT(testing::error_of([&] { (void)optimizer_state_dict(optimizer); }),
              HasSubstr("is not described"));
  register_optimizer<Own, OwnState, OwnOptions>(
      [](StateFields& fields, OwnState& state) {
        fields.count("step", state.step());
        fields.tensor("sum", state.sum());
      },
      [](StateFields& fields, OwnOptions& options) { fields.number("lr", options.lr()); });
  optimizer.step();
  optimizer.step();
  const auto saved = optimizer_state_dict(optimizer);
  const auto& entry = saved.at("state").pairs().front().second;
  EXPECT_EQ(tensor_of(entry.at("step").as_tensor()).item<float>(), 2);
  EXPECT_TRUE(torch::equal(tensor_of(entry.at("sum").as_tensor()), torch::full({2}, 6.0F)));
  Own other({p});
  load_optimizer_state_dict(other, saved);
  other.step();
  EXPECT_EQ(
      tensor_of(
          optimizer_state_dict(other).at("state").pairs().front().second.at("step").as_tensor())
          .item<float>(),
      3);
}

TEST(OwnOptimizers, MayNotForgetAField) {
  EXPECT_THAT(
      testing::error_of([] {
        register_optimizer<OwnOptimizer<2>, OwnState, OwnOptions>(
            [](StateFields& fields, OwnState& state) { fields.tensor("sum", state.sum()); },
            [](StateFields& fields, OwnOptions& options) { fields.number("lr", options.lr()); });
      }),
      HasSubstr("lacks a field of its state [key 'step']"));
  // A tensor that is not there yet is noticed when it is.
  using Own = OwnOptimizer<3>;
  register_optimizer<Own, OwnState, OwnOptions>(
      [](StateFields& fields, OwnState& state) { fields.count("step", state.step()); },
      [](StateFields& fields, OwnOptions& options) { fields.number("lr", options.lr()); });
  const auto p = torch::ones({2}).requires_grad_();
  p.mutable_grad() = torch::ones({2});
  Own optimizer({p});
  optimizer.step();
  EXPECT_THAT(testing::error_of([&] { (void)optimizer_state_dict(optimizer); }),
              HasSubstr("lacks a field of its state [key 'sum']"));
}

}  // namespace

// Options of one group, whatever the optimizer is.

namespace {

at::Tensor trained() {
  return torch::ones({2}).set_requires_grad(true);
}

void expect_options_of_one_group(const OptimizerRef& optimizer) {
  ASSERT_EQ(group_count(optimizer), 2U);
  set_lr(optimizer, 1, 0.25);
  set_weight_decay(optimizer, 0, 0.5);
  EXPECT_EQ(get_lr(optimizer, 0), 0.125);
  EXPECT_EQ(get_lr(optimizer, 1), 0.25);
  EXPECT_EQ(get_weight_decay(optimizer, 0), 0.5);
  EXPECT_EQ(get_weight_decay(optimizer, 1), 0.0625);
  for (const double wrong : {-0.1, std::nan("")}) {
    EXPECT_EQ(code_of([&] { set_lr(optimizer, 0, wrong); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { set_weight_decay(optimizer, 0, wrong); }), ErrorCode::invalid_argument);
  }
  EXPECT_EQ(get_lr(optimizer, 0), 0.125);
  EXPECT_EQ(code_of([&] { static_cast<void>(get_lr(optimizer, 2)); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { set_weight_decay(optimizer, 2, 0); }), ErrorCode::invalid_argument);
}

TEST(ParamGroups, OfAdamWAreItsOptions) {
  const auto group = [] {
    ShardedParameter parameter;
    parameter.names = {"a"};
    parameter.shape = {2};
    parameter.local = trained();
    return ParameterGroup{{std::move(parameter)},
                          {.lr = 0.125, .beta1 = 0.75, .eps = 1e-3, .weight_decay = 0.0625}};
  };
  AdamW optimizer({group(), group()});
  expect_options_of_one_group(optimizer);
  EXPECT_EQ(optimizer.options(1).lr, 0.25);
  EXPECT_EQ(optimizer.options(0).weight_decay, 0.5);
  // The others stay.
  EXPECT_EQ(optimizer.options(1).beta1, 0.75);
  EXPECT_EQ(optimizer.options(1).eps, 1e-3);
}

TEST(ParamGroups, OfTorchsOptimizersAreTheirOptions) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (int i = 0; i < 2; ++i) {
    groups.emplace_back(std::vector{trained()},
                        std::make_unique<torch::optim::SGDOptions>(
                            torch::optim::SGDOptions(0.125).momentum(0.75).weight_decay(0.0625)));
  }
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1));
  expect_options_of_one_group(optimizer);
  const auto& options =
      static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[1].options());
  EXPECT_EQ(options.lr(), 0.25);
  EXPECT_EQ(options.momentum(), 0.75);
}

TEST(ParamGroups, AnOptionThatIsNotThereIsUnsupported) {
  torch::optim::LBFGS optimizer({trained()}, torch::optim::LBFGSOptions(0.5));
  EXPECT_EQ(get_lr(optimizer, 0), 0.5);
  EXPECT_EQ(code_of([&] { set_weight_decay(optimizer, 0, 0.1); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
