// The trainer's state of each rank: O-41, O-51, O-61, O-62, O-73, OQ-15, R20.
#include "tessera/trainer_state.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <set>

#include "base/log.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "format/torch/torch_file.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

const std::string kGolden = std::string(TESSERA_TEST_DATA) + "/golden/fsdp1_uop1_ws2";

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
  fs::copy(kGolden + "/model_and_optim", directory + "/model_and_optim",
           fs::copy_options::recursive);
  write_states(directory, 2);
  return directory;
}

std::string local() {
  std::string directory = copy_of(kGolden + "/local");
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
  const std::string where = kGolden + "/legacy";
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
  for (const std::string& where : {torch_new(), local(), kGolden + "/legacy"}) {
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
  std::mutex mutex;
  std::vector<std::string> told;
  set_log([&](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::warning) told.emplace_back(text);
  });
  const TrainerState found = trainer_state(where, {}, *solo_group());
  set_log({});
  EXPECT_EQ(told, found.warnings);
  EXPECT_EQ(told.size(), 1U);
}

// OQ-15: OLMo gives rank 0's random numbers to all.
TEST(TrainerState, OfAWholeCheckpointOnlyRankZeroGetsRandomNumbers) {
  const std::string where = temporary_directory();
  fs::copy_file(kGolden + "/model.pt", where + "/model.pt");
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
  const std::string legacy = copy_of(kGolden + "/legacy");
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
  expect_failure(kGolden + "/model.pt", ErrorCode::unsupported, "");
  expect_failure(empty + "/x", ErrorCode::not_found, "");
}

// Notes what is opened.
class WatchedStore final : public testing::ForwardingStore {
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
    const auto store = std::make_shared<WatchedStore>(posix_store(where));
    expect_own(trainer_state({store}, {}, group), group.rank());
    std::set<std::string> expected = {"train/rank" + std::to_string(group.rank()) + ".pt"};
    if (group.rank() == 0) expected.insert("metadata.yaml");
    EXPECT_EQ(store->opened, expected);
  });
}

// Where others do not see rank 0's disk.
TEST(TrainerState, RankZeroReadsForRanksThatDoNotSeeIt) {
  const std::string where = torch_new();
  run_ranks(2, [&](Group& group) {
    const std::string mine = group.rank() == 0 ? where : where + "/nowhere";
    expect_own(trainer_state(mine, read_by(LoadReader::rank_zero), group), group.rank());
  });
}

}  // namespace
}  // namespace tessera
