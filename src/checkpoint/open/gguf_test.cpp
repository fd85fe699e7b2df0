// GGUF files as checkpoints, beside what the gguf package makes of them
// (tests/golden/make/gguf_files.py).
#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/read/dequantize.h"
#include "checkpoint/test_support.h"
#include "format/gguf/testing.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using gguf::test::Bytes;

const std::string kEvery = kGolden + "gguf/every.gguf";

nlohmann::json rows_of_every() {
  std::ifstream file(kGolden + "gguf/expected.json");
  return nlohmann::json::parse(file).at("every.gguf").at("tensors");
}

// A file of that name in a store.
Location stored(const std::vector<std::byte>& bytes, const std::string& name = "m.gguf") {
  const auto store = memory_store();
  put(*store, name, bytes, IfExists::fail);
  return {store, name};
}

ErrorCode code_of_open(const std::vector<std::byte>& bytes, const OpenOptions& options = {}) {
  return code_of([&] { (void)Checkpoint::open(stored(bytes), options); });
}

// NaNs have one form in what is expected.
std::uint32_t crc_of_floats(const Tensor& tensor) {
  std::vector<float> values = floats(tensor);
  for (float& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  return crc32(std::as_bytes(std::span(values)));
}

// The leaves but one, of a type that is not dequantized.
Checkpoint without_k(const Checkpoint& checkpoint) {
  return checkpoint.map([](Leaf leaf) -> std::optional<Leaf> {
    if (leaf.name.ends_with("k.weight")) return std::nullopt;
    return leaf;
  });
}

TEST(GgufCheckpoint, HasTensorsValuesAndTypes) {
  const Checkpoint checkpoint = Checkpoint::open(kEvery);
  EXPECT_EQ(checkpoint.kind, CheckpointKind::gguf);
  EXPECT_EQ(to_string(checkpoint.kind), "gguf");
  EXPECT_EQ(checkpoint.path, kEvery);
  const nlohmann::json rows = rows_of_every();
  EXPECT_EQ(checkpoint.names().size(), rows.size());
  const Value tree = checkpoint.load();
  for (const auto& [name, row] : rows.items()) {
    const Tensor& tensor = tree.at(name).as_tensor();
    Shape shape = row.at("shape").get<Shape>();
    if (tensor.dtype == DType::bfloat16) shape.back() /= 2;
    EXPECT_EQ(tensor.shape, shape) << name;
    const Storage& storage = *tensor.pieces.at(0).storage;
    EXPECT_EQ(crc32(ByteView(storage.data, storage.size)), row.at("crc32").get<std::uint32_t>())
        << name;
    const bool is_plain = name.starts_with("plain.") || name == "one";
    EXPECT_EQ(tree.at("gguf_types").find(name) == nullptr, is_plain) << name;
    if (!is_plain) {
      EXPECT_EQ(tensor.dtype, DType::uint8) << name;
      EXPECT_EQ(tree.at("gguf_types").at(name), Value(row.at("type").get<std::string>())) << name;
    }
  }
  EXPECT_EQ(tree.at("gguf").at("general.architecture"), Value("llama"));
  EXPECT_EQ(checkpoint.find("gguf.test.tokens")->value.at(2), Value("▁the"));
}

TEST(GgufCheckpoint, IsDequantizedAsThePackageDoes) {
  const Checkpoint checkpoint = without_k(Checkpoint::open(kEvery));
  int found = 0;
  ConvertOptions options;
  options.dequantize = DType::float32;
  options.memory = 1;  // the smallest windows
  const std::string target = temporary_directory() + "/a.safetensors";
  (void)convert(checkpoint, target, options);
  const Value tree = Checkpoint::open(target).load();
  const nlohmann::json rows = rows_of_every();
  for (const auto& [name, row] : rows.items()) {
    if (!row.contains("dequantized")) continue;
    const Tensor& tensor = tree.at(name).as_tensor();
    EXPECT_EQ(tensor.dtype, DType::float32);
    EXPECT_EQ(tensor.shape, row.at("dequantized").at("shape").get<Shape>()) << name;
    EXPECT_EQ(crc_of_floats(tensor), row.at("dequantized").at("crc32").get<std::uint32_t>())
        << name;
    ++found;
  }
  EXPECT_EQ(found, 5);
  EXPECT_EQ(tree.find("gguf_types"), nullptr);  // they are blocks no more
  EXPECT_EQ(tree.at("gguf").at("test.uint8"), Value(255));
}

// Windows that begin and end anywhere.
TEST(GgufCheckpoint, DequantizesAnyRange) {
  const Checkpoint checkpoint = without_k(Checkpoint::open(kEvery));
  for (const Leaf& leaf : dequantized(checkpoint.leaves, DType::float16)) {
    if (leaf.name != "blk.1.weight") continue;
    const Storage& storage = *leaf.value.as_tensor().pieces.at(0).storage;
    std::vector<std::byte> whole_bytes(storage.size);
    storage.source->read_at(0, whole_bytes);
    for (std::size_t at = 0; at + 131 < storage.size; at += 13) {
      std::vector<std::byte> part(131);
      storage.source->read_at(at, part);
      EXPECT_EQ(std::memcmp(part.data(), whole_bytes.data() + at, part.size()), 0) << at;
    }
  }
}

TEST(GgufCheckpoint, OtherBlocksAreNotDequantized) {
  ConvertOptions options;
  options.dequantize = DType::float32;
  const std::string target = temporary_directory() + "/a.safetensors";
  const Error error = error_of([&] { (void)convert(kEvery, target, options); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_EQ(error.key(), "k.weight");
  EXPECT_NE(error.message().find("Q4_K"), std::string::npos);
}

TEST(GgufCheckpoint, ATypeThatDoesNotFitItsTensor) {
  const auto code = [](const Shape& shape, DType dtype, const char* type) {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.shape = shape;
    const auto bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
    tensor.pieces.push_back(Piece{whole(shape), memory(bytes), 0, {}, -1});
    const std::vector<Leaf> leaves{{"x", Path{"x"}, Value(std::move(tensor))},
                                   {"gguf_types.x", Path{"gguf_types", "x"}, Value(type)}};
    return code_of([&] { (void)dequantized(leaves, DType::float32); });
  };
  EXPECT_EQ(code({2, 33}, DType::uint8, "Q8_0"), ErrorCode::mismatch);
  EXPECT_EQ(code({34}, DType::int8, "Q8_0"), ErrorCode::mismatch);
  EXPECT_EQ(code({}, DType::uint8, "Q8_0"), ErrorCode::mismatch);
  EXPECT_EQ(code({34}, DType::uint8, "F32"), ErrorCode::unsupported);
  EXPECT_EQ(code({34}, DType::uint8, "nothing"), ErrorCode::unsupported);
}

class GgufTargets : public testing::TestWithParam<CheckpointKind> {};

// All values come back, also the types, so blocks can be dequantized later.
TEST_P(GgufTargets, KeepEverything) {
  const std::string target =
      temporary_directory() + "/made" +
      (GetParam() == CheckpointKind::dcp ? "" : std::string(row_of(GetParam()).extensions[0]));
  ConvertOptions options;
  options.to = GetParam();
  (void)convert(kEvery, target, options);
  const Checkpoint made = Checkpoint::open(target);
  const Checkpoint source = Checkpoint::open(kEvery);
  EXPECT_TRUE(diff(source, made).empty());
  EXPECT_EQ(dequantized(without_k(made).leaves, DType::float32).size(),
            dequantized(without_k(source).leaves, DType::float32).size());
  EXPECT_TRUE(verify(made).findings.empty());
}

INSTANTIATE_TEST_SUITE_P(To, GgufTargets,
                         testing::Values(CheckpointKind::dcp, CheckpointKind::torch_file,
                                         CheckpointKind::safetensors));

TEST(GgufCheckpoint, IsNotWritten) {
  const std::string directory = temporary_directory();
  ConvertOptions options;
  options.to = CheckpointKind::gguf;
  EXPECT_EQ(code_of([&] { (void)convert(kEvery, directory + "/a.gguf", options); }),
            ErrorCode::unsupported);
  SaveOptions save_options;
  save_options.kind = CheckpointKind::gguf;
  EXPECT_EQ(code_of([&] {
              (void)save(Value::dict({{"a", 1}}), directory + "/b.gguf", save_options);
            }),
            ErrorCode::unsupported);
}

// Its kind is told by its first bytes, and not by the brace that the number of tensors may be.
TEST(GgufCheckpoint, IsToldByItsContent) {
  Bytes bytes;
  bytes.head('{', 0);
  for (std::uint64_t i = 0; i < '{'; ++i) bytes.tensor(std::to_string(i), {1}, 0, 32 * i);
  bytes.pad(32).zeros(32 * std::size_t{'{'});
  for (const char* name : {"m.gguf", "m.safetensors", "blob"})
    EXPECT_EQ(Checkpoint::open(stored(bytes, name)).leaves.size(), std::size_t{'{'}) << name;
  EXPECT_EQ(code_of_open(std::vector<std::byte>(100)), ErrorCode::corrupt);
}

TEST(GgufCheckpoint, BytesBehindTheLastTensor) {
  const std::vector<std::byte> bytes =
      Bytes().head(1, 0).tensor("t", {1}).pad(32).zeros(32).raw("more");
  const Error error = error_of([&] { (void)Checkpoint::open(stored(bytes)); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_EQ(error.offset(), 96U);
  OpenOptions options;
  options.accept = {"trailing-bytes"};
  const Checkpoint checkpoint = Checkpoint::open(stored(bytes), options);
  EXPECT_EQ(checkpoint.warnings.size(), 1U);
  EXPECT_TRUE(verify(checkpoint).findings.empty());
}

TEST(GgufCheckpoint, NamesThatAreKept) {
  for (const char* name : {"gguf", "gguf_types", "gguf.k", "gguf_types.t"}) {
    EXPECT_EQ(code_of_open(Bytes().head(1, 0).tensor(name, {1}).pad(32).zeros(4)),
              ErrorCode::conflict)
        << name;
  }
  EXPECT_EQ(Checkpoint::open(stored(Bytes().head(1, 0).tensor("ggufs", {1}).pad(32).zeros(4)))
                .leaves.size(),
            1U);
}

TEST(GgufCheckpoint, OneFileOfSeveralSaysSo) {
  const auto warnings = [](std::uint16_t count) {
    return Checkpoint::open(stored(Bytes().head(0, 1).key("split.count", 2).add(count)))
        .warnings.size();
  };
  EXPECT_EQ(warnings(1), 0U);
  EXPECT_EQ(warnings(3), 1U);
}

TEST(GgufCheckpoint, OptionsThatHaveAnEffect) {
  OpenOptions options;
  options.header_limit = 100;
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(kEvery, options); }), ErrorCode::limit);
  options = {};
  options.raw = true;
  EXPECT_EQ(code_of([&] { require_used(options, Checkpoint::open(kEvery, options)); }),
            ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
