// P-36: what a save tells a hook of its phases.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using Names = std::vector<std::string>;

class SaveEvents : public testing::Test {
 protected:
  SaveEvents() {
    options_.events = [this](const Event& event) {
      EXPECT_EQ(event.job, "save");
      const std::lock_guard lock(mutex_);
      checkpoints_[event.rank] = event.checkpoint;
      phases_[event.rank].push_back(std::string(event.phase) + (event.error != nullptr ? "!" : ""));
      bytes_[event.rank].push_back(event.bytes);
      if (event.error != nullptr) codes_.push_back(event.error->code());
    };
  }

  std::string directory_ = temporary_directory();
  SaveOptions options_;
  std::mutex mutex_;
  std::map<int, std::string> checkpoints_;
  std::map<int, Names> phases_;  // each with "!" if it failed
  std::map<int, std::vector<std::uint64_t>> bytes_;
  std::vector<ErrorCode> codes_;
};

TEST_F(SaveEvents, TellEachRankOfItsPhases) {
  const std::string target = directory_ + "/c";
  std::map<int, std::uint64_t> written;
  run_ranks(2, [&](Group& group) {
    const Value tree = Value::dict({{"w", Value(counting({6}, chunk({6}, group.rank(), 2), 0))}});
    const SaveResult result = save(tree, target, options_, group);
    const std::lock_guard lock(mutex_);
    written[group.rank()] = result.bytes_written;
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(checkpoints_[rank], target);
    EXPECT_EQ(phases_[rank], (Names{"plan", "write", "commit", "all"}));
    EXPECT_GT(written[rank], 12U);
    EXPECT_EQ(bytes_[rank], (std::vector<std::uint64_t>{0, written[rank], 0, written[rank]}));
  }
}

TEST_F(SaveEvents, TellOfAFailureOnAllRanks) {
  const std::string target = directory_ + "/c";
  save(Value::dict({{"n", 1}}), target);
  run_ranks(2, [&](Group& group) {
    EXPECT_EQ(code_of([&] {
                save(Value::dict({{"n", 1}}), target, options_, group);
              }),
              ErrorCode::already_exists);
  });
  for (const int rank : {0, 1}) EXPECT_EQ(phases_[rank], (Names{"plan!", "all!"}));
  EXPECT_EQ(codes_, std::vector<ErrorCode>(4, ErrorCode::already_exists));
}

// What no rank can begin was no event at all.
TEST_F(SaveEvents, TellOfASaveThatCannotBegin) {
  run_ranks(2, [&](Group& group) {
    EXPECT_EQ(code_of([&] { save(Value::dict(), directory_ + "/c.pt", options_, group); }),
              ErrorCode::unsupported);
  });
  for (const int rank : {0, 1}) EXPECT_EQ(phases_[rank], (Names{"plan!", "all!"}));
}

// A save into one file told nothing.
TEST_F(SaveEvents, TellOfFiles) {
  const SaveResult result = save(Value::dict({{"w", Value(counting({6}, whole({6}), 0))}}),
                                 directory_ + "/c.pt", options_);
  EXPECT_EQ(phases_[0], (Names{"plan", "write", "all"}));
  EXPECT_EQ(bytes_[0], (std::vector<std::uint64_t>{0, result.bytes_written, result.bytes_written}));
  phases_.clear();
  options_.overwrite = false;
  EXPECT_EQ(code_of([&] { save(Value::dict(), directory_ + "/c.pt", options_); }),
            ErrorCode::already_exists);
  EXPECT_EQ(phases_[0], (Names{"plan", "write!", "all!"}));
}

}  // namespace
}  // namespace tessera
