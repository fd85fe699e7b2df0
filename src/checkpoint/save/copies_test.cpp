// Ranks that hold the same chunks with different values.
#include <gmock/gmock.h>

#include <mutex>

#include "base/log.h"
#include "checkpoint/save/copies.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Shape kLarge{300, 1000};  // 1.2 MB

// The warnings of its life.
class Warnings {
 public:
  Warnings() {
    set_log([this](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex_);
      if (level == LogLevel::warning) texts_.emplace_back(text);
    });
  }
  ~Warnings() { set_log({}); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  [[nodiscard]] const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

float& element(Value& tree, const std::string& key, std::size_t index) {
  const Piece& piece = tree.at(key).as_tensor().pieces.at(0);
  return reinterpret_cast<float*>(piece.storage->data)[index];
}

// The same on every rank: two whole tensors, and one in halves that two ranks hold each.
Value tree_of(int rank) {
  return Value::dict({{"a", counting({10}, whole({10}), 0)},
                      {"b", counting(kLarge, whole(kLarge), 1)},
                      {"h", counting({4, 2}, chunk({4, 2}, rank % 2, 2), 2)}});
}

template <typename Change>
void save_changed(const std::string& directory, const Change& change,
                  const SaveOptions& options = {}) {
  run_ranks(4, [&](Group& group) {
    Value tree = tree_of(group.rank());
    change(group.rank(), tree);
    save(tree, directory, options, group);
  });
}

TEST(Copies, EqualOnesAreNothingToSpeakOf) {
  const Warnings warnings;
  save_changed(temporary_directory() + "/c", [](int, Value&) {});
  EXPECT_THAT(warnings.texts(), IsEmpty());
}

TEST(Copies, OtherValuesAreAWarningThatNamesKeyAndRanks) {
  const Warnings warnings;
  const std::string directory = temporary_directory() + "/c";
  save_changed(directory, [](int rank, Value& tree) {
    if (rank == 2) element(tree, "a", 7) = -1;
    if (rank == 3) element(tree, "h", 0) = -1;
  });
  ASSERT_EQ(warnings.texts().size(), 1);
  EXPECT_THAT(warnings.texts()[0], AllOf(HasSubstr("rank 2 holds other values of 'a' than rank"),
                                         HasSubstr("1 more key")));
  EXPECT_NO_THROW((void)Checkpoint::open(directory).load());
}

TEST(Copies, OfALargeTensorAreSeenWhenMostOfThemDiffers) {
  const Warnings warnings;
  save_changed(temporary_directory() + "/c", [](int rank, Value& tree) {
    for (std::size_t i = 0; rank == 1 && i < 300'000; i += 8) element(tree, "b", i) *= 1.001F;
  });
  ASSERT_EQ(warnings.texts().size(), 1);
  EXPECT_THAT(warnings.texts()[0], HasSubstr("'b'"));
}

TEST(Copies, AreRequiredToBeEqualByAnOption) {
  const Warnings warnings;
  const std::string directory = temporary_directory() + "/c";
  run_ranks(4, [&](Group& group) {
    Value tree = tree_of(group.rank());
    if (group.rank() == 3) element(tree, "h", 1) = -1;
    SaveOptions options;
    if (group.rank() == 0) options.copies = IfDiffers::refuse;  // rank 0's word counts
    try {
      save(tree, directory, options, group);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::mismatch);
      EXPECT_EQ(error.key(), "h");
      EXPECT_THAT(error.what(), HasSubstr("rank 1 holds other values of 'h' than rank 3"));
    }
  });
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  EXPECT_THAT(warnings.texts(), IsEmpty());
  SaveOptions options;
  options.copies = IfDiffers::refuse;
  save_changed(
      directory, [](int, Value&) {}, options);
  EXPECT_NO_THROW((void)Checkpoint::open(directory).load());
}

// Which elements of `count` a sample reads.
std::vector<bool> read_by_sample(std::int64_t count) {
  std::vector<bool> read(static_cast<std::size_t>(count));
  (void)sample_of(
      [&](std::int64_t begin, std::int64_t size, MutableByteView scratch) {
        EXPECT_GE(begin, 0);
        EXPECT_LE(begin + size, count);
        for (auto i = begin; i < begin + size; ++i) read[static_cast<std::size_t>(i)] = true;
        return ByteView(scratch).first(static_cast<std::size_t>(size) * 4);
      },
      count, 4);
  return read;
}

TEST(Copies, SamplesAreWholeOrSpreadFromFirstToLast) {
  for (const std::int64_t count : {1, 255, 256, 257, 16'383, 16'384}) {
    const auto read = read_by_sample(count);
    EXPECT_EQ(std::count(read.begin(), read.end(), false), 0) << count;
  }
  for (const std::int64_t count : {16'385, 1'000'003}) {
    const auto read = read_by_sample(count);
    EXPECT_TRUE(read.front() && read.back()) << count;
    EXPECT_GT(std::count(read.begin(), read.end(), true), 16'000) << count;
  }
}

}  // namespace
}  // namespace tessera
