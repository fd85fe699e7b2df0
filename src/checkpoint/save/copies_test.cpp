#include "checkpoint/save/copies.h"

#include <gmock/gmock.h>

#include "base/testing.h"
#include "checkpoint/test_support.h"
#include "tessera/data_files.h"
#include "tessera/verify.h"

namespace tessera {

// Ranks that hold the same chunks with different values.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Shape kLarge{300, 1000};  // 1.2 MB

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
  EXPECT_FALSE(std::filesystem::exists(directory));
  EXPECT_THAT(warnings.texts(), IsEmpty());
  SaveOptions options;
  options.copies = IfDiffers::refuse;
  save_changed(
      directory, [](int, Value&) {}, options);
  EXPECT_NO_THROW((void)Checkpoint::open(directory).load());
}

// Of a training that would go on with one rank's moments; elsewhere a warning does.
TEST(Copies, OfAnOptimizerAreRequiredToBeEqualByAnOption) {
  const Warnings warnings;
  const std::string directory = temporary_directory() + "/c";
  const auto save_differing = [&](const char* part) {
    run_ranks(2, [&](Group& group) {
      Tensor tensor = counting({4}, whole({4}), static_cast<float>(group.rank()));
      tensor.sharded = false;
      const Value tree = Value::dict({{part, Value::dict({{"w", Value::dict({{"m", tensor}})}})}});
      SaveOptions options;
      options.same_optimizer = group.rank() == 0;  // rank 0's word counts
      save(tree, directory, options, group);
    });
  };
  const Error error = error_of([&] { save_differing("optim"); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch);
  EXPECT_EQ(error.key(), "optim.w.m");
  EXPECT_THAT(error.what(), HasSubstr("copies 'keep' saves each"));
  EXPECT_THAT(warnings.texts(), IsEmpty());
  save_differing("model");
  ASSERT_EQ(warnings.texts().size(), 1U);
  EXPECT_THAT(warnings.texts()[0], HasSubstr("'model.w.m'"));
}

float loaded(const Value& tree, const std::string& key, std::size_t index) {
  return floats(tree.at(key).as_tensor()).at(index);
}

// A difference between the windows of a sample is kept, too (checkpoint-rows OQ-09).
TEST(Copies, WholeTensorsThatDifferAreKeptUnderNamesOfTheirRanks) {
  const Warnings warnings;
  const std::string directory = temporary_directory() + "/c";
  const std::size_t unseen = 1000;  // between the first two windows
  SaveOptions options{.values = IfDiffers::keep, .copies = IfDiffers::keep, .same_keys = true};
  run_ranks(4, [&](Group& group) {
    Value tree = tree_of(group.rank());
    if (group.rank() >= 2) element(tree, "a", 7) = -1;
    if (group.rank() == 3) element(tree, "b", unseen) = -3;
    tree.set_item("n", group.rank() == 1 ? 1 : 0);
    tree.set_item("in", Value::list({counting({2}, whole({2}), group.rank() == 1 ? 8.0F : 9.0F)}));
    SaveOptions own = options;
    if (group.rank() != 0) own.copies = IfDiffers::refuse;  // rank 0's word counts
    save(tree, directory, own, group);
  });
  EXPECT_THAT(warnings.texts(), IsEmpty());
  const Value tree = Checkpoint::open(directory).load();
  EXPECT_EQ(tree.size(),
            3U + 2 + 1 + 2 + 1 + 1);  // a.rank2, a.rank3, b.rank3, n.rank1, in, in.0.rank1
  EXPECT_EQ(loaded(tree, "a", 7), 7);
  EXPECT_EQ(loaded(tree, "a.rank2", 7), -1);
  EXPECT_EQ(loaded(tree, "a.rank3", 7), -1);
  EXPECT_EQ(loaded(tree, "a.rank3", 6), 6);
  EXPECT_EQ(loaded(tree, "b", unseen), 1 + unseen);
  EXPECT_EQ(loaded(tree, "b.rank3", unseen), -3);
  EXPECT_EQ(loaded(tree, "b.rank3", unseen + 1), 2 + unseen);
  EXPECT_EQ(floats(tree.at("h").as_tensor()), floats(counting({4, 2}, whole({4, 2}), 2)));
  EXPECT_EQ(tree.at("n.rank1").as_int(), 1);
  EXPECT_EQ(floats(tree.at("in").items().at(0).as_tensor()).front(), 9);
  EXPECT_EQ(loaded(tree, "in.0.rank1", 0), 8);
  EXPECT_TRUE(verify(directory).findings.empty());
}

TEST(Copies, PartsThatDifferAreNotKept) {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(4, [&](Group& group) {
    Value tree = tree_of(group.rank());
    if (group.rank() == 3) element(tree, "h", 1) = -1;
    if (group.rank() == 3) element(tree, "a", 1) = -1;
    try {
      save(tree, directory, {.copies = IfDiffers::keep}, group);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::mismatch);
      EXPECT_EQ(error.key(), "h");
      EXPECT_THAT(error.what(), HasSubstr("Only whole tensors can be kept"));
    }
  });
  EXPECT_FALSE(std::filesystem::exists(directory));
}

// Tensors of other shapes are no copies that differ.
TEST(Copies, ATensorOfAnotherShapeIsNotKept) {
  const auto store = memory_store();
  run_ranks(2, [&](Group& group) {
    const Shape shape{group.rank() + 3};
    EXPECT_EQ(code_of([&] {
                save(Value::dict({{"w", counting(shape, whole(shape), 0)}}), store,
                     {.copies = IfDiffers::keep}, group);
              }),
              ErrorCode::mismatch);
  });
}

TEST(Copies, ANameOfARankThatIsTakenIsAConflict) {
  const auto store = memory_store();
  run_ranks(3, [&](Group& group) {
    Value tree = Value::dict({{"w", counting({3}, whole({3}), static_cast<float>(group.rank()))}});
    if (group.rank() == 0) tree.set_item("w.rank1", 3);
    try {
      save(tree, store, {.copies = IfDiffers::keep}, group);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::conflict) << error.what();
      EXPECT_EQ(error.key(), "w.rank1");
    }
  });
}

// A file and a part are of one process: there is nothing to compare.
TEST(Copies, OfOneProcessAreNothingToKeep) {
  const std::string directory = temporary_directory();
  const SaveOptions options{.values = IfDiffers::keep, .copies = IfDiffers::keep};
  const Value tree = Value::dict({{"a", counting({10}, whole({10}), 0)}});
  for (const char* name : {"/c", "/c.pt", "/c.safetensors"}) {
    save(tree, directory + name, options);
    EXPECT_EQ(Checkpoint::open(directory + name).load().size(), 1U) << name;
  }
  save_part(tree, directory + "/parts", 0, options);
  EXPECT_EQ(Checkpoint::open(directory + "/parts").load().size(), 1U);
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
