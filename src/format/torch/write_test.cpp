#include <algorithm>
#include <filesystem>
#include <numeric>

#include <gtest/gtest.h>

#include "base/crc32.h"
#include "format/test_support.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"

namespace tessera::torch_file {
namespace {

std::shared_ptr<Storage> memory(std::vector<float> values) {
  auto owner = std::make_shared<std::vector<float>>(std::move(values));
  auto storage = std::make_shared<Storage>();
  storage->data = reinterpret_cast<std::byte*>(owner->data());
  storage->size = owner->size() * sizeof(float);
  storage->owner = owner;
  return storage;
}

Tensor tensor_of(const std::shared_ptr<Storage>& storage, Shape shape, std::int64_t offset = 0,
                 Shape strides = {}) {
  Tensor tensor;
  tensor.shape = std::move(shape);
  tensor.pieces = {{.slice = whole(tensor.shape),
                    .storage = storage,
                    .storage_offset = offset,
                    .strides = std::move(strides)}};
  return tensor;
}

std::vector<float> floats(const Tensor& tensor) {
  const Storage& storage = *tensor.pieces.at(0).storage;
  std::vector<float> values(storage.size / sizeof(float));
  storage.source->read_at(storage.offset, std::as_writable_bytes(std::span(values)));
  return values;
}

// F-01: read and written again, every file that Python's torch.save wrote is the same to the byte.
TEST(TorchWrite, RewritesPyTorchFiles) {
  for (const char* name : {"a.b.c.pt", "train.pt", "g4_dt.pt", "hand.pt", "kinds.pt", "many.pt",
                           "item.pt", "fsdp1_uop0_ws2/model.pt", "fsdp1_uop0_ws2/optim.pt",
                           "fsdp1_uop1_ws2/model.pt", "fsdp1_uop1_ws2/optim.pt"}) {
    const std::vector<std::byte> original = test::golden(name);
    const auto source = test::source(original);
    const std::string first = zip::Archive(source).entries().front().name;
    EXPECT_TRUE(write(read(source), first.substr(0, first.find('/'))) == original) << name;
  }
}

TEST(TorchWrite, SharesStorages) {
  const auto storage = memory({0, 1, 2, 3, 4, 5});
  const Value tree = Value::dict(
      {{"all", tensor_of(storage, {2, 3})}, {"column", tensor_of(storage, {2}, 1, {3})}});
  const Writer writer(tree, "archive");
  ASSERT_EQ(writer.slots().size(), 1U);
  EXPECT_EQ(writer.slots()[0].tensor, &tree.at("all").as_tensor());
  EXPECT_EQ(writer.slots()[0].storage, storage);
  const Value back = read(test::source(write(tree, "archive")));
  EXPECT_EQ(back.at("all").as_tensor().pieces[0].storage,
            back.at("column").as_tensor().pieces[0].storage);
  EXPECT_EQ(back.at("column").as_tensor().pieces[0].strides, Shape{3});
}

// A tensor in pieces becomes one contiguous storage.
TEST(TorchWrite, GathersPieces) {
  Tensor tensor;
  tensor.shape = {2, 4};
  tensor.pieces = {
      {.slice = Box{{0, 2}, {2, 2}},
       .storage = memory({2, 6, 3, 7}),
       .strides = {1, 2}},  // a transposed block
      {.slice = FlatRange{0, 2}, .storage = memory({-1, 0, 1}), .storage_offset = 1, .strides = {}},
      {.slice = FlatRange{4, 6}, .storage = memory({4, 5}), .strides = {}},
  };
  const Value tree(tensor);
  EXPECT_EQ(Writer(tree, "archive").slots()[0].storage, nullptr);
  const Value back = read(test::source(write(tree, "archive")));
  EXPECT_EQ(floats(back.as_tensor()), (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7}));
  tensor.pieces.pop_back();
  EXPECT_EQ(test::thrown([&] { (void)write(Value(tensor), "archive"); }).first,
            ErrorCode::incomplete);
}

// The parts of a Writer tile the archive in ascending order.
TEST(TorchWrite, PartsTileTheArchive) {
  const Value tree = read(test::source(test::golden("kinds.pt")));
  Writer writer(tree, "kinds");
  std::vector<std::pair<std::uint64_t, std::uint64_t>> parts;
  for (const auto& segment : writer.fixed())
    parts.emplace_back(segment.offset, segment.bytes.size());
  for (const auto& slot : writer.slots()) parts.emplace_back(slot.offset, slot.size);
  writer.finish(
      std::vector<std::uint32_t>(writer.slots().size(), 1),
      [&](std::uint64_t offset, ByteView bytes) { parts.emplace_back(offset, bytes.size()); });
  std::sort(parts.begin(), parts.end());
  std::uint64_t end = 0;
  for (const auto& [offset, size] : parts) {
    EXPECT_EQ(offset, end);
    end = offset + size;
  }
  EXPECT_EQ(end, writer.size());
}

TEST(TorchWrite, RefusesWhatTorchWould) {
  const auto storage = memory({1, 2});
  Tensor other = tensor_of(storage, {1});
  other.dtype = DType::int64;
  const auto code = [](const Value& tree, const char* root = "archive") {
    return test::thrown([&] { (void)write(tree, root); }).first;
  };
  EXPECT_EQ(code(Value::list({tensor_of(storage, {2}), other})), ErrorCode::invalid_argument);
  EXPECT_EQ(code(tensor_of(storage, {3})), ErrorCode::corrupt);
  EXPECT_EQ(code(1, ""), ErrorCode::invalid_argument);
  EXPECT_EQ(code(1, "a/b"), ErrorCode::invalid_argument);
  Writer writer(Value(1), "archive");
  EXPECT_THROW(writer.finish({1}, [](std::uint64_t, ByteView) {}), Error);
}

}  // namespace
}  // namespace tessera::torch_file
