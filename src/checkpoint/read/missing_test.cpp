// What of a checkpoint can be read where files of it are missing.
#include "checkpoint/read/missing.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::Contains;
using testing::HasSubstr;

// A DCP directory with one of its files away.
std::string with_missing_file(const Value& tree) {
  const std::string directory = temporary_directory() + "/c";
  save(tree, directory);
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.path().extension() == ".distcp") std::filesystem::remove(entry.path());
  return directory;
}

// As torch's loader, which has nothing to read of it.
TEST(Missing, ATensorWithoutElementsNeedsNoFile) {
  const Shape none{0, 3};
  const std::string directory = with_missing_file(Value::dict(
      {{"a", counting({2}, whole({2}), 1)}, {"empty", counting(none, whole(none), 0)}}));
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.tensor("empty").shape, none);
  EXPECT_EQ(checkpoint.only({"empty"}).load().at("empty").as_tensor().shape, none);
  EXPECT_EQ(code_of([&] { (void)checkpoint.only({"a"}).load(); }), ErrorCode::incomplete);
  const Checkpoint partial = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(partial.names(), std::vector<std::string>{"empty"});
  EXPECT_THAT(partial.warnings, Contains(HasSubstr("left out: a")));
  for (const auto& [target, kind] : {std::pair("/a.pt", CheckpointKind::torch_file),
                                     std::pair("/a.safetensors", CheckpointKind::safetensors),
                                     std::pair("/a", CheckpointKind::dcp)}) {
    ConvertOptions options;
    options.to = kind;
    options.open.partial = true;
    const std::string path = temporary_directory() + target;
    (void)convert(directory, path, options);
    const Checkpoint made = Checkpoint::open(path);
    EXPECT_EQ(made.tensor("empty").shape, none) << target;
  }
  Value tree = Value::dict({{"empty", counting(none, whole(none), 0, false)}});
  (void)load(tree, directory);
  run_ranks(2, [&](Group& group) { (void)load(tree, directory, group); });
}

// A program that looks at the values itself gets none that nobody can read.
TEST(Missing, AValueIsNoPartOfTheTree) {
  const std::string directory = with_missing_file(
      Value::dict({{"a", counting({2}, whole({2}), 1)}, {"values", Value::dict({{"dim", 40}})}}));
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const Error error = error_of([&] { (void)checkpoint.only({"values"}).tree(); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.key(), "values.dim");
  EXPECT_NO_THROW((void)checkpoint.only({"a"}).tree());
}

}  // namespace
}  // namespace tessera
