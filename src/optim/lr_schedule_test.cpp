#include "optim/lr_schedule.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/errors.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/lr_scheduler.h"
#include "value/render.h"

namespace tessera {

// Rates and state dicts beside those of torch.optim.lr_scheduler, which
// tests/golden/make/lr_schedulers.py wrote.

namespace {

constexpr int kSteps = 24, kSavedAfter = 9;

Value golden_of(const char* kind, const std::string& name) {
  static const Value all =
      Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/lr_schedulers.pt").load();
  return name.empty() ? all.at(kind) : all.at(kind).at(name);
}

ShardedParameter whole_parameter(const std::string& name) {
  ShardedParameter parameter;
  parameter.names = {name};
  parameter.shape = {1};
  parameter.local = torch::zeros({1}).set_requires_grad(true);
  return parameter;
}

// Two groups with the rates of the golden, in an optimizer of either library.
struct TwoGroups {
  explicit TwoGroups(bool of_torch) {
    if (of_torch) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const double lr : {0.1, 0.025}) {
        groups.emplace_back(std::vector{torch::zeros({1}).set_requires_grad(true)},
                            std::make_unique<torch::optim::SGDOptions>(lr));
      }
      sgd = std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(1));
    } else {
      adamw = std::make_unique<AdamW>(std::vector<ParameterGroup>{
          {{whole_parameter("a")}, {.lr = 0.1}}, {{whole_parameter("b")}, {.lr = 0.025}}});
    }
  }
  [[nodiscard]] OptimizerRef ref() const { return sgd ? OptimizerRef(*sgd) : OptimizerRef(*adamw); }
  // As the optimizer itself has them.
  [[nodiscard]] std::vector<double> rates() const {
    if (adamw) return {adamw->options(0).lr, adamw->options(1).lr};
    auto& groups = sgd->param_groups();
    return {groups[0].options().get_lr(), groups[1].options().get_lr()};
  }

  std::unique_ptr<torch::optim::SGD> sgd;
  std::unique_ptr<AdamW> adamw;
};

double inverse(std::int64_t epoch) {
  return 1 / (1 + static_cast<double>(epoch));
}

Schedule schedule_of(const std::string& name) {
  if (name == "constant") return ConstantLR{.factor = 0.5, .total_iters = 11};
  if (name == "linear") return LinearLR{.start_factor = 0.2, .end_factor = 0.9, .total_iters = 12};
  if (name == "linear to zero")
    return LinearLR{.start_factor = 1.0, .end_factor = 0.0, .total_iters = 12};
  if (name == "cosine") return CosineAnnealingLR{.t_max = 10, .eta_min = 0.005};
  if (name == "lambda") return LambdaLR{{inverse}};
  if (name == "lambdas") {
    return LambdaLR{
        {inverse, [](std::int64_t epoch) { return std::pow(0.5, static_cast<double>(epoch)); }}};
  }
  return SequentialLR{{LinearLR{.start_factor = 0.25, .total_iters = 6},
                       CosineAnnealingLR{.t_max = 12, .eta_min = 0.001},
                       ConstantLR{.factor = 0.5, .total_iters = 100}},
                      {6, 18}};
}

// The same kind with other numbers, which a state replaces.
Schedule other_numbers(Schedule schedule) {
  std::visit(
      [](auto& kind) {
        using Kind = std::remove_cvref_t<decltype(kind)>;
        if constexpr (std::is_same_v<Kind, ConstantLR>) kind = {.factor = 0.9, .total_iters = 3};
        if constexpr (std::is_same_v<Kind, LinearLR>) kind = {.start_factor = 0.7};
        if constexpr (std::is_same_v<Kind, CosineAnnealingLR>) kind = {.t_max = 5};
        if constexpr (std::is_same_v<Kind, SequentialLR>) {
          kind.milestones = {1, 2};
          for (auto& one : kind.schedulers) one = other_numbers(one);
        }
      },
      schedule.kind());
  return schedule;
}

PlateauOptions plateau_of(const std::string& name) {
  if (name == "min") return {.factor = 0.5, .patience = 1};
  if (name == "max") {
    return {.mode = PlateauMode::max,
            .factor = 0.25,
            .patience = 0,
            .threshold = 0.3,
            .threshold_mode = ThresholdMode::abs,
            .cooldown = 2};
  }
  if (name == "bounded")
    return {.factor = 0.5, .patience = 0, .threshold = 0.05, .min_lr = {0.03, 0.01}, .eps = 1e-3};
  if (name == "max of parts")
    return {.mode = PlateauMode::max, .factor = 0.5, .patience = 2, .threshold = 0.1};
  return {.factor = 0.5,
          .patience = 1,
          .threshold = 0.2,
          .threshold_mode = ThresholdMode::abs,
          .min_lr = {0.001}};
}

void expect_rates(const std::vector<double>& ours, const Value& theirs, const std::string& where) {
  ASSERT_EQ(ours.size(), theirs.size()) << where;
  for (std::size_t g = 0; g < ours.size(); ++g)
    EXPECT_NEAR(ours[g], theirs.at(g).as_real(), 1e-14) << where << ", group " << g;
}

// The same keys in the same order, numbers but for rounding. `_last_lr` of a schedule that has not
// begun is in PyTorch what the other constructors had left.
void expect_same(const Value& ours, const Value& theirs, const std::string& path) {
  const auto is_number = [](const Value& v) {
    return v.is(Value::Kind::real) || v.is(Value::Kind::integer);
  };
  if (is_number(theirs)) {
    ASSERT_TRUE(is_number(ours)) << path;
    if (ours.as_real() != theirs.as_real())
      EXPECT_NEAR(ours.as_real(), theirs.as_real(), 1e-14) << path;
    return;
  }
  ASSERT_EQ(ours.kind(), theirs.kind()) << path;
  if (theirs.is(Value::Kind::dict)) {
    ASSERT_EQ(ours.size(), theirs.size()) << path;
    const auto* epoch = theirs.find("last_epoch");
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const auto& [key, value] = theirs.pairs()[i];
      ASSERT_EQ(render(ours.pairs()[i].first), render(key)) << path;
      if (epoch->as_int() < 0 && key.as_string() == "_last_lr") continue;
      expect_same(ours.pairs()[i].second, value, path + "." + render(key));
    }
  } else if (theirs.is(Value::Kind::list)) {
    ASSERT_EQ(ours.size(), theirs.size()) << path;
    for (std::size_t i = 0; i < theirs.size(); ++i)
      expect_same(ours.at(i), theirs.at(i), path + "." + std::to_string(i));
  } else {
    EXPECT_TRUE(ours == theirs) << path;
  }
}

struct Case {
  std::string name;
  bool of_torch;
};
void PrintTo(const Case& one, std::ostream* out) {  // NOLINT: gtest's name
  *out << one.name << (one.of_torch ? " on SGD" : " on AdamW");
}
std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  std::string name;
  for (const char c : info.param.name) name += std::isalnum(c) != 0 ? c : '_';
  return name + (info.param.of_torch ? "_SGD" : "_AdamW");
}
std::vector<Case> cases(const std::vector<std::string>& names) {
  std::vector<Case> all;
  for (const auto& name : names) {
    all.push_back({name, false});
    all.push_back({name, true});
  }
  return all;
}

class Schedules : public ::testing::TestWithParam<Case> {};

TEST_P(Schedules, GiveTheRatesAndTheStateOfPython) {
  const auto expected = golden_of("schedules", GetParam().name);
  const TwoGroups optimizer(GetParam().of_torch);
  LRScheduler scheduler(optimizer.ref(), schedule_of(GetParam().name));
  for (int step = 0; step <= kSteps; ++step) {
    const auto where = GetParam().name + ", step " + std::to_string(step);
    if (step > 0) scheduler.step();
    EXPECT_EQ(scheduler.last_epoch(), step);
    expect_rates(scheduler.get_last_lr(), expected.at("rates").at(step), where);
    EXPECT_EQ(optimizer.rates(), scheduler.get_last_lr()) << where;
    if (step == kSavedAfter) expect_same(scheduler.state_dict(), expected.at("state"), where);
  }
  EXPECT_EQ(scheduler.base_lrs(), (std::vector{0.1, 0.025}));
}

TEST_P(Schedules, GoOnFromTheStateOfPython) {
  const auto expected = golden_of("schedules", GetParam().name);
  const TwoGroups optimizer(GetParam().of_torch);
  set_lr(optimizer.ref(), 1, 0.7);
  LRScheduler scheduler(optimizer.ref(), other_numbers(schedule_of(GetParam().name)));
  scheduler.step();
  scheduler.load_state_dict(expected.at("state"));
  for (int step = kSavedAfter; step <= kSteps; ++step) {
    const auto where = GetParam().name + ", step " + std::to_string(step);
    if (step > kSavedAfter) scheduler.step();
    expect_rates(scheduler.get_last_lr(), expected.at("rates").at(step), where);
    EXPECT_EQ(optimizer.rates(), scheduler.get_last_lr()) << where;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Schedules,
                         ::testing::ValuesIn(cases({"constant", "linear", "linear to zero",
                                                    "cosine", "lambda", "lambdas", "warm-up"})),
                         name_of_case);

class Plateaus : public ::testing::TestWithParam<Case> {};

TEST_P(Plateaus, GiveTheRatesAndTheStateOfPython) {
  const auto expected = golden_of("plateaus", GetParam().name);
  const auto metrics = golden_of("metrics", {});
  const TwoGroups optimizer(GetParam().of_torch);
  ReduceLROnPlateau scheduler(optimizer.ref(), plateau_of(GetParam().name));
  for (int step = 0; step <= kSteps; ++step) {
    const auto where = GetParam().name + ", step " + std::to_string(step);
    if (step > 0) scheduler.step(metrics.at(step).as_real());
    expect_rates(scheduler.get_last_lr(), expected.at("rates").at(step), where);
    EXPECT_EQ(optimizer.rates(), scheduler.get_last_lr()) << where;
    if (step == kSavedAfter) expect_same(scheduler.state_dict(), expected.at("state"), where);
  }
}

TEST_P(Plateaus, GoOnFromTheStateOfPython) {
  const auto expected = golden_of("plateaus", GetParam().name);
  const auto metrics = golden_of("metrics", {});
  const TwoGroups optimizer(GetParam().of_torch);
  ReduceLROnPlateau scheduler(optimizer.ref());
  scheduler.load_state_dict(expected.at("state"));
  for (int step = kSavedAfter; step <= kSteps; ++step) {
    const auto where = GetParam().name + ", step " + std::to_string(step);
    if (step > kSavedAfter) scheduler.step(metrics.at(step).as_real());
    expect_rates(scheduler.get_last_lr(), expected.at("rates").at(step), where);
    EXPECT_EQ(optimizer.rates(), scheduler.get_last_lr()) << where;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Plateaus,
                         ::testing::ValuesIn(cases({"min", "max", "bounded", "max of parts",
                                                    "min of absolutes"})),
                         name_of_case);

TEST(LRScheduler, RefusesNumbersThatAreOutOfRange) {
  const double nan = std::nan("");
  const std::vector<Schedule> wrong{ConstantLR{.factor = 1.5},
                                    ConstantLR{.factor = nan},
                                    ConstantLR{.total_iters = 0},
                                    LinearLR{.start_factor = 0},
                                    LinearLR{.end_factor = -0.1},
                                    LinearLR{.total_iters = 0},
                                    CosineAnnealingLR{},
                                    CosineAnnealingLR{.t_max = std::int64_t{1} << 62},
                                    CosineAnnealingLR{.t_max = 3, .eta_min = -1},
                                    LambdaLR{},
                                    LambdaLR{{inverse, inverse, inverse}},
                                    LambdaLR{{nullptr}},
                                    SequentialLR{},
                                    SequentialLR{{ConstantLR{}}, {1}},
                                    SequentialLR{{ConstantLR{}, LinearLR{}}, {0}},
                                    SequentialLR{{ConstantLR{}, LinearLR{}, ConstantLR{}}, {4, 4}},
                                    SequentialLR{{ConstantLR{}, CosineAnnealingLR{}}, {4}},
                                    LambdaLR{{[](std::int64_t) { return -1.0; }}},
                                    LambdaLR{{[nan](std::int64_t) { return nan; }}}};
  const TwoGroups optimizer(false);
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    EXPECT_EQ(code_of([&] { LRScheduler(optimizer.ref(), wrong[i]); }), ErrorCode::invalid_argument)
        << i;
    EXPECT_EQ(optimizer.rates(), (std::vector{0.1, 0.025})) << i;
  }
  const std::vector<PlateauOptions> wrong_options{
      {.factor = 1}, {.factor = -0.5}, {.min_lr = {}}, {.min_lr = {0, 0, 0}}, {.min_lr = {-1}}};
  for (std::size_t i = 0; i < wrong_options.size(); ++i) {
    EXPECT_EQ(code_of([&] { ReduceLROnPlateau(optimizer.ref(), wrong_options[i]); }),
              ErrorCode::invalid_argument)
        << i;
  }
}

TEST(LRScheduler, AStepThatFailsChangesNothing) {
  const TwoGroups optimizer(true);
  LRScheduler scheduler(optimizer.ref(),
                        LambdaLR{{inverse, [](std::int64_t epoch) { return 1.0 - epoch; }}});
  scheduler.step();
  const auto before = scheduler.state_dict();
  EXPECT_EQ(code_of([&] { scheduler.step(); }), ErrorCode::invalid_argument);
  EXPECT_TRUE(scheduler.state_dict() == before);
  EXPECT_EQ(optimizer.rates(), scheduler.get_last_lr());
  optimizer.sgd->add_param_group(torch::optim::OptimizerParamGroup(
      {torch::zeros({1})}, std::make_unique<torch::optim::SGDOptions>(1)));
  EXPECT_EQ(code_of([&] { scheduler.step(); }), ErrorCode::mismatch);
  EXPECT_TRUE(scheduler.state_dict() == before);
}

// What a hostile or another scheduler's file may say.
TEST(LRScheduler, AStateThatDoesNotFitChangesNothing) {
  const TwoGroups optimizer(false);
  LRScheduler scheduler(optimizer.ref(), LinearLR{.total_iters = 8});
  scheduler.step();
  const auto before = scheduler.state_dict();
  const auto refused = [&](const char* key, const Value& value) {
    auto state = before.clone();
    state.set_item(key, value);
    const auto code = code_of([&] { scheduler.load_state_dict(state); });
    EXPECT_TRUE(scheduler.state_dict() == before) << key;
    EXPECT_EQ(optimizer.rates(), scheduler.get_last_lr()) << key;
    return code;
  };
  EXPECT_EQ(refused("last_epoch", -1), ErrorCode::invalid_argument);
  EXPECT_EQ(refused("last_epoch", std::numeric_limits<std::int64_t>::max()),
            ErrorCode::invalid_argument);
  EXPECT_EQ(refused("last_epoch", "3"), ErrorCode::mismatch);
  EXPECT_EQ(refused("total_iters", 0), ErrorCode::invalid_argument);
  EXPECT_EQ(refused("_last_lr", Value::list({0.1, -0.1})), ErrorCode::invalid_argument);
  EXPECT_EQ(refused("_last_lr", Value::list({0.1})), ErrorCode::mismatch);
  EXPECT_EQ(refused("base_lrs", Value::list({0.1})), ErrorCode::mismatch);
  EXPECT_EQ(refused("base_lrs", Value::list({0.1, std::nan("")})), ErrorCode::invalid_argument);
  for (const auto* other : {"constant", "cosine", "lambda", "warm-up"}) {
    const auto state = golden_of("schedules", other).at("state");
    EXPECT_EQ(code_of([&] { scheduler.load_state_dict(state); }), ErrorCode::not_found) << other;
  }
  LRScheduler warm_up(optimizer.ref(), SequentialLR{{LinearLR{}, ConstantLR{}}, {2}});
  EXPECT_EQ(
      code_of([&] { warm_up.load_state_dict(golden_of("schedules", "warm-up").at("state")); }),
      ErrorCode::mismatch);
  EXPECT_EQ(code_of([&] { warm_up.load_state_dict(before); }), ErrorCode::not_found);
}

TEST(ReduceLROnPlateau, AStateThatDoesNotFitChangesNothing) {
  const TwoGroups optimizer(false);
  ReduceLROnPlateau scheduler(optimizer.ref(), {.min_lr = {0.1, 0.01}});
  const auto before = scheduler.state_dict();
  const auto refused = [&](const char* key, const Value& value) {
    auto state = before.clone();
    state.set_item(key, value);
    const auto code = code_of([&] { scheduler.load_state_dict(state); });
    EXPECT_TRUE(scheduler.state_dict() == before) << key;
    return code;
  };
  EXPECT_EQ(refused("mode", "median"), ErrorCode::invalid_argument);
  EXPECT_EQ(refused("threshold_mode", 1), ErrorCode::mismatch);
  EXPECT_EQ(refused("num_bad_epochs", -1), ErrorCode::invalid_argument);
  EXPECT_EQ(refused("min_lrs", Value::list({0.1, 0.1, 0.1})), ErrorCode::invalid_argument);
  EXPECT_EQ(refused("_last_lr", Value::list({0.1, 0.1, 0.1})), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
