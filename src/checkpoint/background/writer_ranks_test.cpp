// What the ranks of a CheckpointWriter promise one another.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/background/testing.h"
#include "layout/boxes.h"
#include "tessera/library.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

constexpr std::int64_t kRows = 60;

Value rows_of(const Group& group, float first) {
  return Value::dict(
      {{"w", Value(counting({kRows}, chunk({kRows}, group.rank(), group.size()), first))},
       {"step", static_cast<std::int64_t>(first)}});
}

std::vector<float> from(float first) {
  std::vector<float> values(kRows);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
  return values;
}

class WriterRanks : public testing::TestWithParam<int> {
 protected:
  // Each rank with its writer.
  void run(const WriterOptions& options,
           const std::function<void(CheckpointWriter&, const Group&)>& body) {
    run_ranks(GetParam(), [&](Group& group) {
      CheckpointWriter writer(owned(group), prompt(options));
      body(writer, group);
      // A rank that leaves takes the group along.
      try {
        writer.wait();
      } catch (const Error&) {
        ADD_FAILURE() << "an error that nobody took";
      }
    });
  }
  const std::string directory_ = temporary_directory();
};

TEST_P(WriterRanks, SaveWhatEachHadAtItsCall) {
  run({}, [&](CheckpointWriter& writer, const Group& group) {
    Value tree = rows_of(group, 0);
    for (int step = 1; step <= 20; ++step) {
      tree = rows_of(group, static_cast<float>(step));
      const PendingSave pending = writer.save(tree, directory_, replacing());
      for (float* at = elements_of(tree, "w"); Piece & piece : tree.at("w").as_tensor().pieces)
        std::fill_n(at, numel(piece.slice), -1.0F);
      if (step % 5 != 0) continue;
      const SaveResult result = pending.result();
      EXPECT_FALSE(result.save_id.empty());
    }
  });
  EXPECT_EQ(floats_at(directory_, "w"), from(20));
}

// The same error on all, with each one's share, and the next save works.
TEST_P(WriterRanks, WhatFailsOnOneFailsOnAllAndTheNextWorks) {
  const int bad = GetParam() - 1;
  run({}, [&](CheckpointWriter& writer, const Group& group) {
    writer.save(rows_of(group, 1), directory_).result();
    Value tree = rows_of(group, 2);
    if (group.rank() == bad) tree.at("w").as_tensor().pieces[0].storage->size = 4;
    const PendingSave pending = writer.save(tree, directory_, replacing());
    EXPECT_EQ(pending.staged(), group.rank() != bad);
    const Error error = error_of([&] { pending.result(); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.key(), "w");
    ASSERT_EQ(error.peers().size(), 1U);
    EXPECT_EQ(error.peers().begin()->first, bad);
    writer.save(rows_of(group, 3), directory_, replacing()).result();
  });
  EXPECT_EQ(floats_at(directory_, "w"), from(3));
}

// One rank's arena is too small: nobody waits for it, nobody saves without it.
TEST_P(WriterRanks, NoRoomOnOneIsTheLimitOfAll) {
  run_ranks(GetParam(), [&](Group& group) {
    CheckpointWriter writer(owned(group), prompt({.bytes = group.rank() == 0 ? 1U : 1U << 20U}));
    const Error error = error_of([&] { writer.save(rows_of(group, 1), directory_).result(); });
    EXPECT_EQ(error.code(), ErrorCode::limit) << error.what();
    writer.save(Value::dict({{"step", 1}}), directory_).result();
  });
}

// A rank that throws what others have taken has no part of the next save, and tells them so.
TEST_P(WriterRanks, AnErrorThatOneRankDidNotTakeIsTheNextSavesOnAll_R13) {
  run({}, [&](CheckpointWriter& writer, const Group& group) {
    writer.save(rows_of(group, 1), directory_).result();
    const PendingSave failed = writer.save(rows_of(group, 2), directory_);
    if (group.rank() == 0) {
      EXPECT_EQ(code_of([&] { (void)writer.save(rows_of(group, 3), directory_, replacing()); }),
                ErrorCode::already_exists);
    } else {
      EXPECT_EQ(code_of([&] { failed.result(); }), ErrorCode::already_exists);
      const PendingSave next = writer.save(rows_of(group, 3), directory_, replacing());
      const Error error = error_of([&] { next.result(); });
      EXPECT_EQ(error.code(), ErrorCode::already_exists);
      EXPECT_THAT(error.what(), HasSubstr("an earlier save had failed"));
    }
    writer.save(rows_of(group, 4), directory_, replacing()).result();
  });
  EXPECT_EQ(floats_at(directory_, "w"), from(4));
}

// Which ranks are busy is a matter of time: all get one answer for each call, and no later call
// throws it.
TEST_P(WriterRanks, RefusedSavesAreThoseOfAll_R11) {
  std::atomic<int> saved = 0;
  run({.if_busy = IfBusy::refuse}, [&](CheckpointWriter& writer, const Group& group) {
    std::vector<PendingSave> saves;
    for (int step = 0; step < 30; ++step) {
      saves.push_back(
          writer.save(rows_of(group, static_cast<float>(step)), directory_, replacing()));
      std::this_thread::sleep_for(std::chrono::microseconds(300 * (group.rank() + 1)));
    }
    for (const PendingSave& save : saves) {
      try {
        save.result();
        ++saved;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::limit) << error.what();
      }
    }
  });
  EXPECT_EQ(saved % GetParam(), 0) << "each is saved by all or none";
  EXPECT_GE(saved, GetParam());
}

// A rank that has gone: the others hear of it, and their writers end.
TEST(WriterOfLostRanks, HasAnErrorAndDoesNotHang) {
  for (const int ranks : {2, 4}) {
    const std::string directory = temporary_directory();
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_NO_THROW(run_ranks(ranks, [&](Group& group) {
      if (group.rank() == 0) return;
      CheckpointWriter writer(owned(group), prompt());
      for (int save = 1; save <= 2; ++save) {
        EXPECT_EQ(code_of([&] { writer.save(rows_of(group, 1), directory).result(); }),
                  ErrorCode::peer_failed);
      }
    }));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

// Ranks ask one another how they go on, and a thread of its own does the work.
class WithoutInterrupts final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  [[nodiscard]] bool carries_interrupts() const noexcept override { return false; }
  void interrupt() override {}
  [[nodiscard]] std::stop_token interrupted() override { return {}; }
};

TEST_P(WriterRanks, HooksDoNotWaitForTheirOwnSave) {
  std::atomic<int> told = 0;
  run_ranks(GetParam(), [&](Group& group) {
    CheckpointWriter writer(std::make_shared<WithoutInterrupts>(group), prompt());
    writer.save(rows_of(group, 1), directory_).result();
    SaveOptions options = replacing();
    options.progress = [&](const Progress&) {
      ++told;
      EXPECT_EQ(code_of([&] { writer.save(Value(), directory_); }), ErrorCode::invalid_argument);
      EXPECT_EQ(floats_at(directory_, "w"), from(1));
    };
    writer.save(rows_of(group, 2), directory_, options).result();
    group.barrier();  // the writers do not use it any more
  });
  EXPECT_GE(told, GetParam());
  EXPECT_EQ(floats_at(directory_, "w"), from(2));
}

INSTANTIATE_TEST_SUITE_P(Of, WriterRanks, testing::Values(1, 2, 4));

// A rank that writes ten times what others do makes all wait for it.
TEST(WriterRanks, TheLogTellsWhatASaveCost) {
  const std::string directory = temporary_directory() + "/c";
  std::mutex mutex;
  std::vector<std::string> costs;
  set_log([&](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::info && text.find("by this rank") != std::string_view::npos)
      costs.emplace_back(text);
  });
  run_ranks(2, [&](Group& group) {
    CheckpointWriter writer(owned(group), prompt());
    const std::int64_t count = group.rank() == 0 ? 90'000 : 10'000;
    writer.save(Value::dict({{"w" + std::to_string(group.rank()), numbers(count, 1)}}), directory)
        .result();
  });
  set_log({});
  ASSERT_EQ(costs.size(), 2U);
  EXPECT_THAT(costs, ::testing::Contains(HasSubstr("1.8 times the mean of 2 ranks")));
  EXPECT_THAT(costs, ::testing::Contains(HasSubstr("0.2 times the mean of 2 ranks")));
  for (const std::string& cost : costs) EXPECT_THAT(cost, HasSubstr("s to copy"));
}

}  // namespace
}  // namespace tessera
