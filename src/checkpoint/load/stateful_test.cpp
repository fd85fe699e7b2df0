// Objects that give and take their state (P-01, P-02).
#include "tessera/stateful.h"

#include <atomic>
#include <mutex>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// One rank's rows of a weight, and a counter.
class Part : public Stateful {
 public:
  explicit Part(const Group& group, bool fill)
      : weight(counting({7, 2}, chunk({7, 2}, group.rank(), group.size()), 100, fill)),
        steps(fill ? 12 : 0) {}

  [[nodiscard]] Value state_dict() const override {
    ++asked;
    if (refuses_to_give) throw Error(ErrorCode::unsupported, "no state today");
    return Value::dict({{"weight", weight}, {"steps", steps}});
  }
  void load_state_dict(const Value& state) override {
    ++given;
    if (refuses_to_take) throw Error(ErrorCode::invalid_argument, "not this one");
    steps = state.at("steps").as_int();
    seen = floats(state.at("weight").as_tensor());
  }

  Tensor weight;
  std::int64_t steps = 0;
  std::vector<float> seen;  // of the weight, when the state was handed over
  bool refuses_to_give = false;
  bool refuses_to_take = false;
  mutable int asked = 0;
  int given = 0;
};

class StatefulRanks : public testing::Test {
 protected:
  void save_by(int ranks) const {
    run_ranks(ranks, [&](Group& group) {
      Part part(group, true);
      Value step = 5;
      Value tree = Value::dict({{"names", Value::list({"a", "b"})}});
      save({{"part", part}, {"step", step}, {"tree", tree}}, directory_, group);
      EXPECT_EQ(part.asked, 1);
      EXPECT_EQ(part.given, 0);
    });
  }

  std::string directory_ = temporary_directory() + "/c";
};

TEST_F(StatefulRanks, GiveAtASaveAndTakeAtALoad) {
  save_by(3);
  run_ranks(2, [&](Group& group) {
    Part part(group, false);
    Value step;
    Value tree = Value::dict({{"names", Value()}});
    load({{"part", part}, {"step", step}, {"tree", tree}}, directory_, group);
    EXPECT_EQ(part.given, 1);
    EXPECT_EQ(part.steps, 12);
    EXPECT_EQ(part.seen, floats(Part(group, true).weight));
    EXPECT_EQ(floats(part.weight), part.seen);  // in place
    EXPECT_EQ(step.as_int(), 5);
    EXPECT_EQ(tree.at("names").items().at(1).as_string(), "b");
  });
}

TEST_F(StatefulRanks, AFailedLoadHandsOverNothing) {
  save_by(2);
  std::atomic<int> refused{0};
  run_ranks(2, [&](Group& group) {
    Part part(group, false);
    Value step = 1;
    Value more = 2;
    StateMap state = {{"part", part}, {"step", step}};
    if (group.rank() == 1) state.emplace("more", more);
    const Error error = error_of([&] { load(state, directory_, group); });
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_EQ(error.key(), "more");
    EXPECT_EQ(part.given, 0);
    EXPECT_EQ(floats(part.weight)[0], 0);
    EXPECT_EQ(step.as_int(), 1);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST_F(StatefulRanks, WhatOneRanksObjectThrowsIsThrownOnAll) {
  std::atomic<int> refused{0};
  run_ranks(2, [&](Group& group) {
    Part part(group, true);
    part.refuses_to_give = group.rank() == 1;
    const Error error = error_of([&] { save({{"part", part}}, directory_, group); });
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.key(), "part");
    ++refused;
  });
  EXPECT_FALSE(std::filesystem::exists(directory_));
  save_by(2);
  run_ranks(2, [&](Group& group) {
    Part part(group, false);
    part.refuses_to_take = group.rank() == 0;
    const Error error = error_of([&] { load({{"part", part}}, directory_, group); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(part.given, 1);
    ++refused;
  });
  EXPECT_EQ(refused, 4);
}

TEST(StatefulState, IsALoadLikeAnyOther) {
  const std::string path = temporary_directory() + "/c.pt";
  const auto group = solo_group();
  Part part(*group, true);
  Value extra = 3;
  save({{"part", part}, {"extra", extra}}, path);
  Part fresh(*group, false);
  const LoadReport report = load({{"part", fresh}}, path);
  EXPECT_EQ(report.extra, std::vector<std::string>{"extra"});
  EXPECT_EQ(fresh.seen, floats(part.weight));
  const Checkpoint renamed = Checkpoint::open(path).map([](Leaf leaf) -> std::optional<Leaf> {
    if (leaf.name.starts_with("part.")) leaf.name = "other." + leaf.name.substr(5);
    return leaf;
  });
  Part other(*group, false);
  load({{"other", other}}, renamed, {}, *group);
  EXPECT_EQ(other.steps, 12);
}

}  // namespace
}  // namespace tessera
