// The stream of torch.save before 1.6 (F-01, P28); its values are compared with PyTorch's in
// src/checkpoint/golden_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/numbers.h"
#include "format/pickle/pickle.h"
#include "format/test_support.h"
#include "format/torch/stream.h"
#include "format/torch/torch_file.h"

namespace tessera::torch_file {
namespace {

using namespace std::string_view_literals;
using Bytes = std::vector<std::byte>;

const char* const kStream = "checkpoints/stream.pt";

ErrorCode stream_code(Bytes bytes) {
  const auto [code, threw] = test::thrown([&] { (void)read(test::source(std::move(bytes))); });
  EXPECT_TRUE(threw);
  return code;
}

// `bytes` with the `count` bytes at the first place of `from` replaced.
Bytes replaced(Bytes bytes, std::string_view from, std::string_view to) {
  const auto view = [](std::string_view text) { return std::as_bytes(std::span(text)); };
  const auto at = std::search(bytes.begin(), bytes.end(), view(from).begin(), view(from).end());
  EXPECT_NE(at, bytes.end());
  EXPECT_EQ(from.size(), to.size());
  std::copy(view(to).begin(), view(to).end(), at);
  return bytes;
}

TEST(TorchStream, ViewsShareStorages) {
  const Value tree = read(test::source(test::golden(kStream)));
  const auto storage = [&](const char* name) {
    return tree.at(name).as_tensor().pieces[0].storage;
  };
  EXPECT_EQ(storage("shared"), storage("transposed"));
  EXPECT_EQ(storage("shared"), storage("row"));
  EXPECT_EQ(tree.at("row").as_tensor().pieces[0].storage_offset, 4);
  EXPECT_FALSE(storage("plain")->crc32.has_value());
}

// Up to torch 0.4 a storage could be a part of another one.
TEST(TorchStream, PartsOfStorages) {
  const Value tree = read(test::source(test::golden("checkpoints/stream_view.pt")));
  const Storage& whole = *tree.at("whole").as_tensor().pieces[0].storage;
  const Storage& part = *tree.at("part").as_tensor().pieces[0].storage;
  EXPECT_EQ(part.offset, whole.offset + 16);
  EXPECT_EQ(part.size, 20U);
  EXPECT_EQ(tree.at("again").as_tensor().pieces[0].storage.get(), &part);
}

// P28
TEST(TorchStream, AnotherMagicVersionOrByteOrderIsRefused) {
  const Bytes good = test::golden(kStream);
  EXPECT_EQ(stream_code(replaced(good, "\x6c\xfc", "\x6c\xfd")), ErrorCode::corrupt);
  EXPECT_EQ(stream_code(replaced(good, "M\xe9\x03.", "M\xea\x03.")), ErrorCode::unsupported);
  const Bytes big = [&] {
    const std::string_view key = "little_endian";
    Bytes bytes = good;
    const auto text = std::as_bytes(std::span(key));
    auto at = std::search(bytes.begin(), bytes.end(), text.begin(), text.end());
    at = std::find(at, bytes.end(), std::byte{0x88});  // NEWTRUE
    *at = std::byte{0x89};
    return bytes;
  }();
  EXPECT_EQ(stream_code(big), ErrorCode::unsupported);
  EXPECT_EQ(stream_code(replaced(good, "little_endian", "little_indian")), ErrorCode::corrupt);
}

TEST(TorchStream, EveryTruncationIsRefused) {
  const Bytes good = test::golden(kStream);
  for (std::size_t size = 1; size < good.size(); ++size) {
    EXPECT_EQ(stream_code(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size))),
              ErrorCode::incomplete)
        << size;
  }
}

TEST(TorchStream, StoragesMustBeThoseOfTheTree) {
  Bytes more = test::golden(kStream);
  more.push_back(std::byte{0});
  EXPECT_EQ(stream_code(more), ErrorCode::unsupported);
  const Bytes first = test::golden("checkpoints/stream_first.pt");
  Bytes count = first;  // the number of elements before the 24 bytes at the end
  count[first.size() - 32] = std::byte{5};
  EXPECT_EQ(stream_code(count), ErrorCode::corrupt);
  EXPECT_EQ(stream_code(replaced(first, "X\x01\0\0\0"sv, "X\x01\0\0\x01"sv)),
            ErrorCode::incomplete);
}

}  // namespace
}  // namespace tessera::torch_file
