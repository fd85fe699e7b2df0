#include "checkpoint/write/convert.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "checkpoint/test_support.h"

namespace tessera {

// Any kind into any other and back, and the tree that survives the trip.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// Saved by two ranks, with values of every plain kind beside the tensors.
std::string two_rank_checkpoint() {
  const std::string directory = temporary_directory() + "/dcp";
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict();
    Value model = Value::dict();
    model.set_item("w", Value(counting({6, 300000}, chunk({6, 300000}, group.rank(), 2), 0)));
    model.set_item("columns", Value(counting({50, 8}, chunk({50, 8}, group.rank(), 2, 1), 7)));
    model.set_item("empty", Value(counting({0, 3}, whole({0, 3}), 0)));
    tree.set_item("model", model);
    tree.set_item(
        "values",
        Value::list({Value::dict({{Value("lr"), Value(0.1)},
                                  {Value("inf"), Value(std::numeric_limits<double>::infinity())},
                                  {Value("betas"), Value::tuple({Value(0.9), Value(1)})},
                                  {Value("none"), Value()},
                                  {Value("name"), Value("caf\xC3\xA9")},
                                  {Value("flag"), Value(true)}})}));
    save(tree, directory, group);
  });
  return directory;
}

void convert_to(const std::string& source, const std::string& target, CheckpointKind kind) {
  ConvertOptions options;
  options.to = kind;
  convert(source, target, options);
}

TEST(Convert, EveryKindIntoEveryOtherAndBack) {
  const std::string dcp = two_rank_checkpoint();
  const std::string root = temporary_directory();
  const Checkpoint original = Checkpoint::open(dcp);
  convert_to(dcp, root + "/a.safetensors", CheckpointKind::safetensors);
  convert_to(root + "/a.safetensors", root + "/b.pt", CheckpointKind::torch_file);
  convert_to(root + "/b.pt", root + "/c", CheckpointKind::dcp);
  convert_to(root + "/c", root + "/d.pt", CheckpointKind::torch_file);
  convert_to(root + "/d.pt", root + "/e.safetensors", CheckpointKind::safetensors);
  convert_to(root + "/e.safetensors", root + "/f", CheckpointKind::dcp);
  for (const char* name : {"/a.safetensors", "/b.pt", "/c", "/d.pt", "/e.safetensors", "/f"}) {
    const auto differences = diff(original, Checkpoint::open(root + name));
    EXPECT_TRUE(differences.empty())
        << name << ": " << differences.at(0).name << " " << differences.at(0).text;
    EXPECT_TRUE(verify(root + name).findings.empty()) << name;
  }
}

TEST(Convert, AnExistingTargetIsKeptUnlessOverwritten) {
  const std::string dcp = two_rank_checkpoint();
  const std::string target = temporary_directory() + "/a.safetensors";
  convert_to(dcp, target, CheckpointKind::safetensors);
  EXPECT_EQ(code_of([&] { convert_to(dcp, target, CheckpointKind::safetensors); }),
            ErrorCode::already_exists);
  ConvertOptions options;
  options.overwrite = true;
  options.only = {"model.w"};
  EXPECT_EQ(convert(dcp, target, options).tensors, 1U);
  EXPECT_EQ(Checkpoint::open(target).leaves.size(), 1U);
}

TEST(Convert, ADamagedSourceLeavesNoTarget) {
  const std::string dcp = two_rank_checkpoint();
  for (const auto& entry : std::filesystem::directory_iterator(dcp)) {
    if (entry.path().extension() != ".distcp") continue;
    const int fd = ::open(entry.path().c_str(), O_RDWR);
    ASSERT_EQ(::pwrite(fd, "XXXX", 4, 2'000'000), 4);
    ::close(fd);
  }
  const std::string root = temporary_directory();
  EXPECT_EQ(code_of([&] { convert_to(dcp, root + "/a.safetensors", CheckpointKind::safetensors); }),
            ErrorCode::corrupt);
  EXPECT_TRUE(std::filesystem::is_empty(root));
}

// PyTorch's loader of distributed checkpoints fails on a root that is no dict.
TEST(Convert, ADistributedCheckpointIsADict) {
  const std::string number = std::string(TESSERA_TEST_DATA) + "/golden/checkpoints/i7.pt";
  const std::string root = temporary_directory();
  EXPECT_EQ(code_of([&] { convert_to(number, root + "/a", CheckpointKind::dcp); }),
            ErrorCode::mismatch);
  EXPECT_TRUE(std::filesystem::is_empty(root));
  EXPECT_NO_THROW(convert_to(number, root + "/a.pt", CheckpointKind::torch_file));
}

TEST(Convert, TheTargetsNameAndKindMustAgree) {
  const std::string dcp = two_rank_checkpoint();
  const std::string root = temporary_directory();
  EXPECT_EQ(code_of([&] { convert_to(dcp, root + "/a.pt", CheckpointKind::safetensors); }),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { convert_to(dcp, root + "/a.pt", CheckpointKind::dcp); }),
            ErrorCode::invalid_argument);
}

TEST(Diff, NamesEveryKindOfDifference) {
  const auto group = solo_group();
  const auto one = [&](const std::string& directory, const Value& tree) {
    save(tree, directory, *group);
  };
  const std::string root = temporary_directory();
  one(root + "/a", Value::dict({{Value("same"), Value(counting({3}, whole({3}), 0))},
                                {Value("shape"), Value(counting({3}, whole({3}), 0))},
                                {Value("value"), Value(counting({3}, whole({3}), 0))},
                                {Value("gone"), Value(1)}}));
  one(root + "/b", Value::dict({{Value("same"), Value(counting({3}, whole({3}), 0))},
                                {Value("shape"), Value(counting({4}, whole({4}), 0))},
                                {Value("value"), Value(counting({3}, whole({3}), 2))},
                                {Value("new"), Value(1)}}));
  std::string text;
  for (const Difference& difference :
       diff(Checkpoint::open(root + "/a"), Checkpoint::open(root + "/b"))) {
    text += std::string(to_string(difference.kind)) + " " + difference.name + "; ";
  }
  EXPECT_EQ(text, "missing gone; shape shape; value value; extra new; ");
}

}  // namespace
}  // namespace tessera
