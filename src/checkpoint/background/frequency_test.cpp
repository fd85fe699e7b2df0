// How often a training saves that leaves it to a share of its time.
#include "checkpoint/background/frequency.h"

#include <gmock/gmock.h>

#include <chrono>
#include <limits>
#include <thread>
#include <vector>

#include "checkpoint/background/testing.h"
#include "comm/testing.h"
#include "tessera/save_frequency.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::ElementsAre;

TEST(StepCosts, ASaveCostsWhatItsStepsAreLonger) {
  StepCosts costs;
  EXPECT_EQ(costs.step(), 0);
  EXPECT_FALSE(costs.save());
  for (const double seconds : {1.0, 1.0, 9.0, 1.0, 1.0}) costs.add_step(seconds, false);
  EXPECT_EQ(costs.step(), 1);  // one that took long says nothing
  costs.add_step(1.5, true);
  costs.add_step(1.25, true);
  costs.end_save();
  EXPECT_DOUBLE_EQ(*costs.save(), 0.75);
  costs.add_step(0.5, true);  // none costs less than nothing
  costs.end_save();
  EXPECT_DOUBLE_EQ(*costs.save(), 0.375);
}

TEST(StepCosts, OnlyTheLastSavesCount) {
  StepCosts costs;
  costs.add_step(1, false);
  for (const double seconds : {100.0, 2.0, 2.0, 2.0, 2.0}) {
    costs.add_step(seconds, true);
    costs.end_save();
  }
  EXPECT_DOUBLE_EQ(*costs.save(), 1);
}

// For any costs: so far apart saves keep to their share, and one step less would not.
TEST(StepCosts, SavesAreAsOftenAsTheShareAllows) {
  for (const double save : {0.0, 0.001, 0.3, 7.0, 5000.0}) {
    for (const double step : {0.0001, 0.2, 30.0}) {
      for (const double share : {0.001, 0.02, 0.5, 1.0}) {
        const auto apart = static_cast<double>(steps_apart(save, step, {.share = share}));
        EXPECT_LE(save, apart * step * share * (1 + 1e-9));
        EXPECT_TRUE(apart == 1 || save > (apart - 1) * step * share);
        EXPECT_GE(apart, 1);
      }
    }
  }
  EXPECT_EQ(steps_apart(100, 1, {.share = 0.01, .most = 50}), 50);
  EXPECT_EQ(steps_apart(0, 0, {.share = 0.01, .most = 7}), 7);
  EXPECT_EQ(steps_apart(0, 1, {.share = 0.01, .least = 5}), 5);
}

// The dearest rank counts: a save of 50 steps there.
TEST(SaveFrequency, ComesAsOftenAsTheShareAllowsOnAllRanks) {
  constexpr auto kStep = 1ms;
  std::vector<std::vector<int>> all(2);
  run_ranks(2, [&](Group& group) {
    SaveFrequency frequency(group, {.share = 1, .first = 5});
    for (int step = 1; step <= 120; ++step) {
      std::this_thread::sleep_for(kStep);
      if (!frequency.due()) continue;
      all.at(static_cast<std::size_t>(group.rank())).push_back(step);
      if (group.rank() == 1) std::this_thread::sleep_for(50 * kStep);  // the save
    }
    EXPECT_GT(frequency.distance(), 1);
  });
  EXPECT_EQ(all[0], all[1]);
  ASSERT_GE(all[0].size(), 2U);
  EXPECT_EQ(all[0].front(), 5);
  for (std::size_t i = 1; i < all[0].size(); ++i) EXPECT_GT(all[0][i] - all[0][i - 1], 1);
}

TEST(SaveFrequency, NeverComesBeforeTheLastSaveIsDecided) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt());
  SaveFrequency frequency({.share = 1, .first = 3, .most = 1});
  std::optional<PendingSave> pending;
  int dues = 0;
  for (int step = 1; step <= 40; ++step) {
    if (!frequency.due()) continue;
    ++dues;
    pending = writer.save(Value::dict({{"w", numbers(1, 1)}}), slow.where());
    frequency.began(*pending);
  }
  EXPECT_EQ(dues, 1);
  slow.gate().open();
  pending->result();
  int more = 0;
  while (!frequency.due()) ++more;
  EXPECT_LE(more, 20);  // it asks again behind a quarter of the steps that it has waited
}

// What fails at once is not cheap.
TEST(SaveFrequency, AFailedSaveDoesNotComeAgainAtOnce) {
  CheckpointWriter writer(prompt());
  SaveFrequency frequency({.share = 1, .first = 5});
  std::vector<int> dues;
  for (int step = 1; step <= 40; ++step) {
    std::this_thread::sleep_for(1ms);
    if (!frequency.due()) continue;
    dues.push_back(step);
    const PendingSave failing = writer.save(Value::dict({{"w", numbers(1, 1)}}), "/dev/null/no");
    EXPECT_THROW(failing.result(), Error);
    EXPECT_TRUE(failing.failed());
    frequency.began(failing);
  }
  EXPECT_THAT(dues, ElementsAre(5, 10, 15, 20, 25, 30, 35, 40));
  EXPECT_EQ(frequency.distance(), 0);
}

// A save() that throws the error of the one before has no handle.
TEST(SaveFrequency, ASaveThatThrowsDoesNotComeAgainAtOnce) {
  SaveFrequency frequency({.share = 1, .first = 5, .least = 4});
  CheckpointWriter writer(prompt());
  std::vector<int> dues;
  for (int step = 1; step <= 40; ++step) {
    std::this_thread::sleep_for(1ms);
    if (!frequency.due()) continue;
    dues.push_back(step);
    if (dues.size() == 1) {
      frequency.began(writer.save(Value::dict({{"w", numbers(1, 1)}}), memory_store()));
      writer.wait();
    }
  }
  ASSERT_GE(dues.size(), 2U);
  for (std::size_t i = 1; i < dues.size(); ++i) EXPECT_GE(dues[i] - dues[i - 1], 4);
}

// The first one, too, keeps to the bounds if it fails.
TEST(SaveFrequency, BoundsHoldWhateverFails) {
  for (const FrequencyOptions& options :
       {FrequencyOptions{.first = 3, .least = 20}, FrequencyOptions{.first = 30, .most = 20},
        FrequencyOptions{.first = 3, .least = std::numeric_limits<std::int64_t>::max()}}) {
    SaveFrequency frequency(options);
    CheckpointWriter writer(prompt());
    std::vector<std::int64_t> dues;
    for (int step = 1; step <= 100; ++step) {
      if (!frequency.due()) continue;
      dues.push_back(step);
      const PendingSave failing = writer.save(Value::dict({{"w", 1}}), "/dev/null/no");
      EXPECT_THROW(failing.result(), Error);
      frequency.began(failing);
    }
    for (std::size_t i = 1; i < dues.size(); ++i) EXPECT_EQ(dues[i] - dues[i - 1], 20);
    EXPECT_EQ(dues.size(), options.least > 20 ? 1U : (options.first == 3 ? 5U : 4U));
  }
}

TEST(SaveFrequency, RefusesWhatNobodyMeans) {
  for (const FrequencyOptions& options :
       {FrequencyOptions{.share = 0}, FrequencyOptions{.share = 1.5},
        FrequencyOptions{.share = std::numeric_limits<double>::quiet_NaN()},
        FrequencyOptions{.first = 2}, FrequencyOptions{.most = -1}, FrequencyOptions{.least = 0},
        FrequencyOptions{.least = 5, .most = 4}})
    EXPECT_EQ(code_of([&] { SaveFrequency refused(options); }), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
