#include <atomic>
#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "format/torch/torch_file.h"
#include "tessera/stateful.h"

namespace tessera {

// Objects that give and take their state (P-01, P-02).

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

class StatefulRanks : public ::testing::Test {
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

// The trainer's state of each rank: O-41, O-51, O-61, O-62, O-73, OQ-15, R20.

namespace {

namespace fs = std::filesystem;

const std::string kFsdpGolden = std::string(TESSERA_TEST_DATA) + "/golden/fsdp1_uop1_ws2";

// What rank `rank` has saved: its random numbers are a tensor, as PyTorch's are.
Value state_of(int rank, int step = 40) {
  const Value rng =
      Value::dict({{"torch", Value(counting({3}, whole({3}), static_cast<float>(10 * rank)))},
                   {"python", Value::tuple({3, rank})}});
  return Value::dict({{"global_step", step}, {"mine", rank}, {"rng", rng}});
}

void write_state(const std::string& path, const Value& state) {
  const std::vector<std::byte> bytes = torch_file::write(state, fs::path(path).stem().string());
  fs::create_directories(fs::path(path).parent_path());
  write_text(path, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

std::string train_file(const std::string& directory, int rank) {
  return directory + "/train/rank" + std::to_string(rank) + ".pt";
}

void write_states(const std::string& directory, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) write_state(train_file(directory, rank), state_of(rank));
}

// PyTorch's model and optimizer of two ranks, with a trainer's state of each.
std::string torch_new() {
  const std::string directory = temporary_directory();
  fs::copy(kFsdpGolden + "/model_and_optim", directory + "/model_and_optim",
           fs::copy_options::recursive);
  write_states(directory, 2);
  return directory;
}

std::string local() {
  std::string directory = copy_of(kFsdpGolden + "/local");
  write_states(directory, 2);
  write_text(directory + "/metadata.yaml", "world_size: 2\n");
  return directory;
}

void expect_own(const TrainerState& found, int rank) {
  ASSERT_TRUE(found.state.has_value());
  EXPECT_EQ((*found.state)["mine"].as_int(), rank);
  const float first = static_cast<float>(10 * rank);
  EXPECT_EQ(floats((*found.state)["rng"]["torch"].as_tensor()),
            (std::vector<float>{first, first + 1, first + 2}));
  EXPECT_TRUE(found.warnings.empty());
}

LoadOptions read_by(LoadReader reader) {
  LoadOptions options;
  options.reader = reader;
  return options;
}

TEST(TrainerState, EachRankGetsItsOwn) {
  for (const std::string& where : {torch_new(), local()}) {
    for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
      run_ranks(2, [&](Group& group) {
        expect_own(trainer_state(where, read_by(reader), group), group.rank());
      });
    }
  }
}

// What PyTorch's ranks have put beside model and optimizer.
TEST(TrainerState, OfLegacyFilesItStandsBesideModelAndOptimizer) {
  const std::string where = kFsdpGolden + "/legacy";
  run_ranks(2, [&](Group& group) {
    const TrainerState found = trainer_state(where, {}, group);
    const Value file =
        torch_file::read(posix_store(where)->open("rank" + std::to_string(group.rank()) + ".pt"));
    ASSERT_EQ(found.state->size(), file.size() - 2);
    EXPECT_EQ(found.state->at("global_step"), file.at("global_step"));
    EXPECT_NE(found.state->find("rng"), nullptr);
    EXPECT_EQ(found.state->find("optim"), nullptr);
  });
}

TEST(TrainerState, OtherNumbersOfRanksGetRankZerosWithoutRandomNumbers) {
  for (const std::string& where : {torch_new(), local(), kFsdpGolden + "/legacy"}) {
    for (const int ranks : {1, 3, 4}) {
      for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
        run_ranks(ranks, [&](Group& group) {
          const TrainerState found = trainer_state(where, read_by(reader), group);
          ASSERT_TRUE(found.state.has_value());
          EXPECT_NE(found.state->find("global_step"), nullptr);
          EXPECT_EQ(found.state->find("rng"), nullptr);
          ASSERT_EQ(found.warnings.size(), 1U);
          EXPECT_NE(found.warnings[0].find("of 2 ranks, here are " + std::to_string(ranks)),
                    std::string::npos);
        });
      }
    }
  }
}

TEST(TrainerState, TheLogIsTold) {
  const std::string where = torch_new();
  TrainerState found;
  const std::vector<std::string> told =
      warnings_of([&] { found = trainer_state(where, {}, *solo_group()); });
  EXPECT_EQ(told, found.warnings);
  EXPECT_EQ(told.size(), 1U);
}

// OQ-15: OLMo gives rank 0's random numbers to all.
TEST(TrainerState, OfAWholeCheckpointOnlyRankZeroGetsRandomNumbers) {
  const std::string where = temporary_directory();
  fs::copy_file(kFsdpGolden + "/model.pt", where + "/model.pt");
  const auto expect_state = [&](int mine) {
    for (const int ranks : {1, 3}) {
      run_ranks(ranks, [&](Group& group) {
        const TrainerState found = trainer_state(where, {}, group);
        if (group.rank() == 0) return expect_own(found, mine);
        EXPECT_EQ((*found.state)["mine"].as_int(), mine);
        EXPECT_EQ(found.state->find("rng"), nullptr);
        EXPECT_EQ(found.warnings.size(), 1U);
      });
    }
  };
  EXPECT_FALSE(trainer_state(where, {}, *solo_group()).state.has_value());
  write_state(where + "/other.pt", state_of(1));  // O-41: the old name
  expect_state(1);
  write_state(where + "/train.pt", state_of(2));
  expect_state(2);
}

void expect_failure(const std::string& where, ErrorCode code, const std::string& text) {
  run_ranks(2, [&](Group& group) {
    try {
      (void)trainer_state(where, {}, group);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  });
}

// R20: never another rank's.
TEST(TrainerState, AMissingFileIsIncomplete) {
  for (const std::string& where : {torch_new(), local()}) {
    for (const int rank : {1, 0}) {
      const std::string file = train_file(where, rank);
      fs::remove(file);
      expect_failure(where, ErrorCode::incomplete,
                     "of rank " + std::to_string(rank) + " is missing: there is no train/rank" +
                         std::to_string(rank) + ".pt");
      write_state(file, state_of(rank));
    }
  }
  const std::string legacy = copy_of(kFsdpGolden + "/legacy");
  fs::remove(legacy + "/rank1.pt");
  expect_failure(legacy, ErrorCode::incomplete, "there is no rank1.pt");
}

TEST(TrainerState, NobodyHasOneWhereNobodySavedOne) {
  const std::string where = local();
  fs::remove_all(where + "/train");
  for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
    run_ranks(2, [&](Group& group) {
      EXPECT_FALSE(trainer_state(where, read_by(reader), group).state.has_value());
    });
  }
}

TEST(TrainerState, DamagedFilesAndThoseOfOtherStepsAreRefusedOnAllRanks) {
  const std::string where = local();
  write_state(train_file(where, 1), state_of(1, 41));
  expect_failure(where, ErrorCode::mismatch, "different steps: 40 and 41");
  write_state(train_file(where, 1), state_of(1));
  const std::string whole_file = text_of(train_file(where, 1));
  write_text(train_file(where, 1), whole_file.substr(0, whole_file.size() / 2));
  run_ranks(2, [&](Group& group) { EXPECT_THROW((void)trainer_state(where, {}, group), Error); });
  std::string flipped = whole_file;  // of the random numbers
  const std::string ten("\x00\x00\x20\x41", 4);
  ASSERT_NE(flipped.find(ten), std::string::npos);
  flipped[flipped.find(ten)] ^= 1;
  write_text(train_file(where, 1), flipped);
  expect_failure(where, ErrorCode::corrupt, "");
}

TEST(TrainerState, OtherKindsAreRefused) {
  const std::string empty = temporary_directory();
  expect_failure(empty, ErrorCode::unsupported, "none of OLMo's kinds");
  expect_failure(kFsdpGolden + "/model.pt", ErrorCode::unsupported, "");
  expect_failure(empty + "/x", ErrorCode::not_found, "");
}

// Notes what is opened.
class NotingStore final : public testing_support::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    opened.emplace(name);
    return inner().open(name);
  }
  mutable std::set<std::string> opened;
};

TEST(TrainerState, EachRankOpensItsOwnFileAlone) {
  const std::string where = local();
  run_ranks(2, [&](Group& group) {
    const auto store = std::make_shared<NotingStore>(posix_store(where));
    expect_own(trainer_state({store}, {}, group), group.rank());
    std::set<std::string> expected = {"train/rank" + std::to_string(group.rank()) + ".pt"};
    if (group.rank() == 0) expected.insert("metadata.yaml");
    EXPECT_EQ(store->opened, expected);
  });
}

// The other rank does not see rank 0's disk.
TEST(TrainerState, RankZeroReadsForRanksThatDoNotSeeIt) {
  const std::string where = torch_new();
  run_ranks(2, [&](Group& group) {
    const std::string mine = group.rank() == 0 ? where : where + "/nowhere";
    expect_own(trainer_state(mine, read_by(LoadReader::rank_zero), group), group.rank());
  });
}

}  // namespace

// An optimizer's state by its key alone, cut over the ranks that load (checkpoint-rows P-29).

namespace {

using ::testing::HasSubstr;

Tensor whole_tensor(const Shape& shape, float first) {
  auto tensor = counting(shape, whole(shape), first);
  tensor.sharded = false;
  return tensor;
}

// A state of which `group` saves: rows of some tensors on every rank, the rest whole.
Value saved_tree(const Group& group) {
  const auto rows = [&](const Shape& shape, float first) {
    return counting(shape, chunk(shape, group.rank(), group.size()), first);
  };
  const auto entries = Value::dict({{"step", whole_tensor({}, 7)},
                                    {"exp_avg", rows({7, 3}, 100)},
                                    {"one", whole_tensor({1, 1}, 9)},
                                    {"rows", rows({2}, 300)}});
  const auto groups = Value::list({Value::dict({{"lr", 0.5},
                                                {"betas", Value::tuple({0.9, 0.95})},
                                                {"params", Value::list({"layer.weight"})}})});
  return Value::dict({{"optim", Value::dict({{"state", Value::dict({{"layer.weight", entries}})},
                                             {"param_groups", groups}})},
                      {"model", Value::dict({{"layer.weight", rows({7, 3}, 0)}})},
                      {"optim2", Value::dict({{"state", 1}})},
                      {"epoch", 3}});
}

class OptimizerStateRanks : public ::testing::Test {
 protected:
  void save_by(int ranks) const {
    run_ranks(ranks, [&](Group& group) { save(saved_tree(group), directory_, group); });
  }

  std::string directory_ = temporary_directory() + "/c";
};

void expect_rows(const Value& value, const Shape& shape, float first, const Group& group) {
  const auto& tensor = value.as_tensor();
  EXPECT_EQ(tensor.shape, shape);
  EXPECT_TRUE(tensor.sharded);
  const auto box = chunk(shape, group.rank(), group.size());
  if (numel(box) == 0) {
    EXPECT_TRUE(tensor.pieces.empty());
    return;
  }
  ASSERT_EQ(tensor.pieces.size(), 1u);
  EXPECT_EQ(tensor.pieces[0].slice, Slice(box));
  EXPECT_EQ(floats(tensor), floats(counting(shape, box, first)));
}

void expect_whole(const Value& value, const Shape& shape, float element) {
  const auto& tensor = value.as_tensor();
  EXPECT_EQ(tensor.shape, shape);
  EXPECT_FALSE(tensor.sharded);
  EXPECT_EQ(floats(tensor), std::vector<float>{element});
}

TEST_F(OptimizerStateRanks, IsCutOverTheRanksThatLoad_P29) {
  save_by(2);
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](Group& group) {
      const auto loaded = load_sharded_optimizer_state_dict("optim", directory_, group);
      ASSERT_EQ(loaded.size(), 1u);  // neither "model" nor a key that begins alike
      const auto& entries = loaded.at("optim").at("state").at("layer.weight");
      expect_rows(entries.at("exp_avg"), {7, 3}, 100, group);
      expect_rows(entries.at("rows"), {2}, 300, group);
      expect_whole(entries.at("step"), {}, 7);
      expect_whole(entries.at("one"), {1, 1}, 9);
      const auto& options = loaded.at("optim").at("param_groups").at(0);
      EXPECT_EQ(options.at("lr").as_real(), 0.5);
      EXPECT_EQ(options.at("betas"), Value::tuple({0.9, 0.95}));
      EXPECT_EQ(options.at("params"), Value::list({"layer.weight"}));
    });
  }
}

TEST_F(OptimizerStateRanks, TensorsAreInMemoryOfTheirOwn_P29) {
  save_by(1);
  run_ranks(2, [&](Group& group) {
    const auto first = load_sharded_optimizer_state_dict("optim", directory_, group);
    const auto& tensor = first.at("optim").at("state").at("layer.weight").at("exp_avg");
    auto& piece = tensor.as_tensor().pieces[0];
    std::memset(piece.storage->data, 0, piece.storage->size);
    const auto second = load_sharded_optimizer_state_dict("optim", directory_, group);
    expect_rows(second.at("optim").at("state").at("layer.weight").at("exp_avg"), {7, 3}, 100,
                group);
  });
}

TEST_F(OptimizerStateRanks, OfAnOpenedAndMappedCheckpoint_P29) {
  save_by(2);
  run_ranks(2, [&](Group& group) {
    const auto opened = Checkpoint::open(directory_).map([](Leaf leaf) -> std::optional<Leaf> {
      if (leaf.name == "optim.state.layer.weight.one") return std::nullopt;
      return leaf;
    });
    const auto loaded = load_sharded_optimizer_state_dict("optim", opened, {}, group);
    const auto& entries = loaded.at("optim").at("state").at("layer.weight");
    EXPECT_EQ(entries.find("one"), nullptr);
    expect_rows(entries.at("exp_avg"), {7, 3}, 100, group);
  });
}

TEST_F(OptimizerStateRanks, OtherKeysAreOneErrorOnAllRanks_P29) {
  save_by(2);
  run_ranks(2, [&](Group& group) {
    const auto load = [&](const std::string& key, const std::string& path,
                          const LoadOptions& options = {}) {
      return [&, key, path, options] {
        (void)load_sharded_optimizer_state_dict(key, path, options, group);
      };
    };
    for (const std::string key : {"optimizer", "opt", "optim.state", ""}) {
      try {
        load(key, directory_)();
        ADD_FAILURE() << key;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::not_found);
        EXPECT_EQ(error.key(), key);
        EXPECT_THAT(error.what(), HasSubstr("'epoch', 'model', 'optim', 'optim2'"));
      }
    }
    EXPECT_EQ(code_of(load("optim", directory_ + "/none")), ErrorCode::not_found);
    EXPECT_EQ(
        code_of(load("optim", directory_, {.rename = [](const std::string& key) { return key; }})),
        ErrorCode::invalid_argument);
    // A part that only one rank cannot read is every rank's failure.
    EXPECT_EQ(code_of(load(group.rank() == 0 ? "optim" : "else", directory_)),
              ErrorCode::not_found);
  });
}

}  // namespace
}  // namespace tessera
