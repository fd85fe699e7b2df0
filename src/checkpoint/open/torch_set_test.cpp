// Sets of files of torch.save with an index: what the index says, and what is wrong with damaged
// ones.
#include <filesystem>
#include <fstream>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)

const char* const kTorchIndex = "/pytorch_model.bin.index.json";
const char* const kFirst = "/pytorch_model-00001-of-00002.bin";
const char* const kSecond = "/pytorch_model-00002-of-00002.bin";

Value tensor(float first) {
  return Value(counting({2, 3}, whole({2, 3}), first));
}

void write_index(const std::string& path, const std::string& total,
                 const std::vector<std::pair<std::string, std::string>>& files) {
  std::string text = R"({"metadata": {"total_size": )" + total + R"(}, "weight_map": {)";
  for (const auto& [name, file] : files)
    text += (text.ends_with('{') ? "\"" : ", \"") + name + R"(": ")" + file.substr(1) + "\"";
  std::ofstream(path) << text + "}}";
}

// Three tensors of 24 bytes in two files.
std::string made() {
  const std::string directory = temporary_directory();
  save(Value::dict({{"a.weight", tensor(0)}, {"b", tensor(10)}}), directory + kFirst);
  save(Value::dict({{"c", tensor(20)}, {"version", 4}}), directory + kSecond);
  write_index(directory + kTorchIndex, "72", {{"a.weight", kFirst}, {"b", kFirst}, {"c", kSecond}});
  return directory;
}

TEST(TorchSet, FollowsTheIndex) {
  const std::string directory = made();
  for (const std::string& path : {directory, directory + kTorchIndex}) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.kind, CheckpointKind::torch_file);
    EXPECT_EQ(checkpoint.leaves.size(), 4U);
    EXPECT_EQ(checkpoint.files.size(), 3U);
    EXPECT_EQ(checkpoint.warnings, std::vector<std::string>{});
    const Value tree = checkpoint.load();
    EXPECT_EQ(floats(tree.at("c").as_tensor()), (std::vector<float>{20, 21, 22, 23, 24, 25}));
    EXPECT_EQ(tree.at("version").as_int(), 4);
    EXPECT_TRUE(verify(path).findings.empty());
  }
  for (const auto& [name, kind] : {std::pair("/a.bin", CheckpointKind::torch_file),
                                   std::pair("/a", CheckpointKind::safetensors)}) {
    ConvertOptions options;
    options.to = kind;
    const std::string target = temporary_directory() + name;
    convert(directory, target, options);
    EXPECT_TRUE(diff(Checkpoint::open(directory), Checkpoint::open(target)).empty());
  }
}

TEST(TorchSet, FilesThatContradictTheIndex) {
  const std::string missing = made();
  fs::remove(missing + kSecond);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(missing).load(); }), ErrorCode::incomplete);
  EXPECT_EQ(verify(missing).findings.size(), 1U);
  const Checkpoint there = Checkpoint::open(missing, {.partial = true});
  EXPECT_EQ(there.load().size(), 2U);
  fs::remove(missing + kFirst);
  EXPECT_EQ(open_code(missing), ErrorCode::incomplete);
  const std::string absent = made();
  write_index(absent + kTorchIndex, "96",
              {{"a.weight", kFirst}, {"b", kFirst}, {"c", kSecond}, {"d", kSecond}});
  EXPECT_EQ(open_code(absent), ErrorCode::incomplete);
  const std::string elsewhere = made();
  write_index(elsewhere + kTorchIndex, "72",
              {{"a.weight", kFirst}, {"b", kSecond}, {"c", kSecond}});
  EXPECT_EQ(open_code(elsewhere), ErrorCode::incomplete);
  const std::string twice = made();
  save(Value::dict({{"c", tensor(20)}, {"b", tensor(0)}}), twice + kSecond, {.overwrite = true});
  const Checkpoint decided = Checkpoint::open(twice);
  EXPECT_EQ(floats(decided.load().at("b").as_tensor())[0], 10);
  EXPECT_EQ(decided.warnings.size(), 1U);
  const std::string leaves = made();
  write_index(leaves + kTorchIndex, "72", {{"a.weight", "/../x.bin"}});
  EXPECT_EQ(open_code(leaves), ErrorCode::unsafe);
  const std::string list = made();
  save(Value::list({tensor(0)}), list + kSecond, {.overwrite = true});
  EXPECT_EQ(open_code(list), ErrorCode::mismatch);
  const std::string more = made();
  write_index(more + kTorchIndex, "48", {{"b", kFirst}, {"c", kSecond}});
  EXPECT_EQ(Checkpoint::open(more).warnings.size(), 1U);
  write_index(more + kTorchIndex, "72", {{"b", kFirst}, {"c", kSecond}});
  EXPECT_EQ(Checkpoint::open(more).warnings.size(), 2U);  // and the sizes do not add up
  EXPECT_EQ(verify(more).findings.size(), 1U);
}

// The first is the error's, the others stand in its text.
TEST(TorchSet, EachFileThatIsCutShortIsTold) {
  const std::string directory = made();
  for (const char* file : {kFirst, kSecond})
    fs::resize_file(directory + file, fs::file_size(directory + file) / 2);
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_NE(error.path().find(kFirst), std::string::npos) << error.what();
  EXPECT_NE(error.message().find(kSecond), std::string::npos) << error.what();
}

void append(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::app | std::ios::binary) << bytes;
}

// torch.load goes by the last end record that it finds.
TEST(TorchSet, BytesBehindTheEndOfAnArchiveCanBePassedOver) {
  const std::string directory = made();
  append(directory + kSecond, std::string(16, '\0'));
  const OpenOptions accepting{.accept = {"trailing-bytes"}};
  for (const std::string& path : {directory, directory + kTorchIndex, directory + kSecond}) {
    const Error error = error_of([&] { (void)Checkpoint::open(path); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
    EXPECT_NE(error.message().find("16 bytes after the end of the zip archive; --accept "
                                   "trailing-bytes passes over them"),
              std::string::npos)
        << error.what();
    const Checkpoint checkpoint = Checkpoint::open(path, accepting);
    EXPECT_EQ(floats(checkpoint.only({"c"}).load().at("c").as_tensor())[1], 21);
    ASSERT_EQ(checkpoint.warnings.size(), 1U);
    EXPECT_NE(checkpoint.warnings[0].find("16 bytes after the end"), std::string::npos);
    EXPECT_TRUE(verify(path, {.open = accepting}).findings.empty());
  }
  // More than the last end record reaches to the end is no archive.
  append(directory + kSecond, std::string(1 << 17, 'x'));
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory + kSecond, accepting); }),
            ErrorCode::incomplete);
}

// The bytes of an end record in a file that is no zip say nothing.
TEST(TorchSet, NothingIsPassedOverInAStream) {
  const std::string path = temporary_directory() + "/a.pt";
  const std::string record = "PK\5\6" + std::string(18, '\0');
  fs::copy_file(kGolden + "legacy.pt", path);
  append(path, record + "x");
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(path, {.accept = {"trailing-bytes"}}); }),
            ErrorCode::unsupported);
}

TEST(TorchSet, OneFileBesideTheIndexThatDoesNotNameIt) {
  const std::string directory = made();
  save(Value::dict({{"d", tensor(0)}}), directory + "/pytorch_model.bin");
  EXPECT_EQ(open_code(directory), ErrorCode::conflict);
  EXPECT_EQ(Checkpoint::open(directory + kTorchIndex).leaves.size(), 4U);
  EXPECT_EQ(Checkpoint::open(directory, {.ignore_index = true}).leaves.size(), 1U);
  for (const char* file : {kTorchIndex, kFirst, kSecond}) fs::remove(directory + file);
  EXPECT_EQ(Checkpoint::open(directory).leaves.size(), 1U);
  EXPECT_EQ(Checkpoint::open(directory).warnings, std::vector<std::string>{});
}

// As huggingface's loaders have it.
TEST(TorchSet, SafetensorsComeFirst) {
  const std::string directory = made();
  save(Value::dict({{"d", tensor(0)}}), directory + "/model.safetensors");
  EXPECT_EQ(Checkpoint::open(directory).kind, CheckpointKind::safetensors);
  EXPECT_EQ(Checkpoint::open(directory).warnings.size(), 1U);
  EXPECT_EQ(Checkpoint::open(directory + kTorchIndex).kind, CheckpointKind::torch_file);
}

TEST(TorchSet, SeveralIndices) {
  const std::string directory = made();
  fs::rename(directory + kTorchIndex, directory + "/a.bin.index.json");
  EXPECT_EQ(Checkpoint::open(directory).leaves.size(), 4U);
  fs::copy_file(directory + "/a.bin.index.json", directory + "/b.bin.index.json");
  EXPECT_EQ(open_code(directory), ErrorCode::conflict);
  EXPECT_EQ(Checkpoint::open(directory + "/b.bin.index.json").leaves.size(), 4U);
}

}  // namespace
}  // namespace tessera
