// What lies in a checkpoint's place when its files are opened at their first read (fault-rows C04).
#include <gmock/gmock.h>

#include <filesystem>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/test_support.h"
#include "tessera/convert.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

// Two tensors, a file each.
void save_two(const std::string& directory, float first) {
  Value tree = Value::dict();
  for (const char* name : {"a", "b"}) {
    Tensor tensor = counting({50, 8}, whole({50, 8}), first);
    tensor.sharded = false;
    tree.set_item(name, Value(std::move(tensor)));
  }
  (void)save(tree, directory, {.overwrite = true, .one_file_an_item = true});
}

// As PyTorch does: with names that every save has, and without digests.
void save_as_torch(const std::string& directory, float first) {
  const std::string made = temporary_directory();
  save_two(made, first);
  const auto store = posix_store(made);
  dcp::Metadata metadata = read_dcp_metadata(*store);
  fs::create_directories(directory);
  int number = 0;
  for (dcp::Entry& entry : metadata.entries) {
    dcp::Chunk chunk = *entry.chunks.begin();
    const std::string name = "__0_" + std::to_string(number++) + ".distcp";
    fs::rename(fs::path(made) / chunk.item.path, fs::path(directory) / name);
    chunk.item.path = name;
    entry.chunks = {};
    entry.chunks.push_back(chunk);
  }
  const Bytes bytes = dcp::encode(metadata);
  put(*posix_store(directory), kDcpMetadata, bytes, IfExists::replace);
}

void save_set(const std::string& directory, float first) {
  const std::string made = temporary_directory();
  save_two(made, first);
  ConvertOptions options;
  options.to = CheckpointKind::safetensors;
  options.max_shard_size = 2000;
  options.overwrite = true;
  (void)convert(made, directory, options);
}

// The first element of a tensor, or none where it is refused as replaced.
std::optional<float> first_of(const Checkpoint& checkpoint, const std::string& name) {
  std::vector<float> values(400);
  try {
    checkpoint.read(name, TensorView::of(values.data(), DType::float32, {50, 8}));
    return values.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::conflict) << error.what();
    return std::nullopt;
  }
}

// In another directory of this process while it lives.
class WorkingIn {
 public:
  explicit WorkingIn(const std::string& directory) : before_(fs::current_path()) {
    fs::current_path(directory);
  }
  ~WorkingIn() { fs::current_path(before_); }

 private:
  fs::path before_;
};

TEST(OpenedLater, AnotherWorkingDirectoryDoesNotMatter_C04) {
  const std::string root = temporary_directory();
  for (const char* in : {"/A", "/B"}) {
    const float first = in[1] == 'A' ? 1 : 2;
    save_as_torch(root + in + "/dcp", first);
    save_set(root + in + "/set", first);
  }
  for (const char* name : {"dcp", "./set", "set/../dcp/", ".//dcp"}) {
    const WorkingIn first(root + "/A");
    const Checkpoint checkpoint = Checkpoint::open(name);
    const WorkingIn second(root + "/B");
    EXPECT_EQ(first_of(checkpoint, "a"), 1.0F) << name;
  }
}

TEST(OpenedLater, WhatWasReplacedMeanwhileIsNotReadForIt_C04) {
  for (auto* save : {&save_as_torch, &save_set}) {
    const std::string directory = temporary_directory() + "/c";
    save(directory, 1);
    const Checkpoint checkpoint = Checkpoint::open(directory);
    EXPECT_EQ(first_of(checkpoint, "a"), 1.0F);
    save(directory, 2);
    EXPECT_THAT(first_of(checkpoint, "a"), ::testing::AnyOf(1.0F, std::nullopt));
    EXPECT_THAT(first_of(checkpoint, "b"), ::testing::AnyOf(1.0F, std::nullopt));
    EXPECT_EQ(first_of(Checkpoint::open(directory), "b"), 2.0F);
  }
}

}  // namespace
}  // namespace tessera
