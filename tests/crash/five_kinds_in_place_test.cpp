// What is in the place of a save or a load of any kind, and does not belong there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "five_kinds_testing.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::AnyOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(FiveKindsInPlace, ATargetThatExistsIsKeptUnlessItIsACheckpointToReplace) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 1);
    const auto before = contents_of(path);
    const auto save_over = [&](bool overwrite) {
      return one_error(errors_of([&](Group& group) {
               (void)save(training_state(group.rank(), 2, 2), path,
                          options_for_kind(kind, overwrite), group);
             }))
          .code();
    };
    EXPECT_EQ(save_over(false), ErrorCode::already_exists);
    EXPECT_EQ(contents_of(path), before);
    fs::remove_all(path);
    std::ofstream(path) << "a file";
    EXPECT_EQ(save_over(true), ErrorCode::already_exists);
    if (kind == CheckpointKind::dcp) return;  // it may lie beside other files
    fs::remove(path);
    fs::create_directory(path);
    std::ofstream(path + "/thesis.txt") << "years";
    EXPECT_EQ(save_over(true), ErrorCode::already_exists);
    EXPECT_EQ(contents_of(path).size(), 1U);
  });
}

TEST(FiveKindsInPlace, FilesThatAreMissingOrOfAnotherStepAreErrorsOfAllRanks) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string other = parent_of(path) + "/step5";
    save_by(2, kind, other, 5);
    save_by(2, kind, path, 4);
    const std::string file = file_of_rank_one(kind, path);
    fs::remove(file);
    const Error error = one_error(errors_of([&](Group& group) {
      Value model = Value::dict({{"model", training_state(group.rank(), 2, 0).at("model")}});
      (void)load(model, path, {}, group);
    }));
    EXPECT_THAT(error.code(), AnyOf(ErrorCode::incomplete, ErrorCode::not_found));
    // Files of other kinds have no step in their names: the digests of a restore tell.
    if (kind != CheckpointKind::dcp && kind != CheckpointKind::olmo_torch_new) return;
    const std::string stranger = file_of_rank_one(kind, other);
    fs::copy_file(stranger, fs::path(file).replace_filename(fs::path(stranger).filename()));
    EXPECT_FALSE(verify(path).findings.empty());
  });
}

TEST(FiveKindsInPlace, ACheckpointOfAnotherModelIsAMismatchOrMissingKeys) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 1);
    const Error error = one_error(errors_of([&](Group& group) {
      Value model = Value::dict();
      model.set_item("a.w", flat_tensor({12, 5}, group.rank(), 2, 0));
      model.set_item("c.w", flat_tensor({3}, group.rank(), 2, 0));
      Value tree = Value::dict({{"model", model}});
      (void)load(tree, path, {}, group);
    }));
    EXPECT_THAT(error.code(), AnyOf(ErrorCode::mismatch, ErrorCode::not_found));
    EXPECT_THAT(error.what(), HasSubstr("model.a.w"));
    EXPECT_THAT(error.what(), HasSubstr("model.c.w"));
  });
}

TEST(FiveKindsInPlace, AConfigThatNamesAnotherKindIsInvalidAndWritesNothing) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    if (kind == CheckpointKind::dcp || kind == CheckpointKind::olmo_full) return;
    const Error error = one_error(errors_of([&](Group& group) {
      SaveOptions options = options_for_kind(kind, false);
      options.olmo.config = kind == CheckpointKind::olmo_local
                                ? "sharded_checkpointer: torch_legacy\n"
                                : "sharded_checkpointer: local\n";
      (void)save(training_state(group.rank(), 2, 2), path, options, group);
    }));
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(fs::is_empty(parent_of(path)));
  });
}

TEST(FiveKindsInPlace, ANameThatLeavesTheStoreIsUnsafe) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    if (kind == CheckpointKind::dcp) return;  // it is a store's root
    const auto store = posix_store(parent_of(path) + "/run");
    for (const char* name : {"../step4", "/step4", "a/../../step4"}) {
      const Error error = one_error(errors_of([&](Group& group) {
        (void)save(training_state(group.rank(), 2, 2), Location(store, name),
                   options_for_kind(kind, false), group);
      }));
      EXPECT_EQ(error.code(), ErrorCode::unsafe) << name << ": " << error.what();
    }
    EXPECT_TRUE(fs::is_empty(parent_of(path)));
  });
}

}  // namespace
}  // namespace tessera
