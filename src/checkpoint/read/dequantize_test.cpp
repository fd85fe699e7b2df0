// Quantized weights (P-28, OQ-12), against what torch computes from the formats' definitions
// (tests/golden/make/quantized.py).
#include "checkpoint/read/dequantize.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// The CRC-32 of the elements, with every NaN made the same.
std::uint32_t crc_of(const Tensor& tensor) {
  const Storage& storage = *tensor.pieces.at(0).storage;
  std::vector<std::byte> bytes(storage.data, storage.data + storage.size);
  const auto same_nan = [&](auto element, auto exponent, auto nan) {
    for (std::size_t i = 0; i < bytes.size(); i += sizeof element) {
      std::memcpy(&element, bytes.data() + i, sizeof element);
      const bool is_nan =
          (element & exponent) == exponent &&
          (element & static_cast<decltype(element)>((nan & ~exponent) * 2 - 1)) != 0;
      element = nan;
      if (is_nan) std::memcpy(bytes.data() + i, &element, sizeof element);
    }
  };
  if (tensor.dtype == DType::float32) {
    same_nan(std::uint32_t{0}, std::uint32_t{0x7F800000}, std::uint32_t{0x7FC00000});
  } else if (tensor.dtype == DType::bfloat16) {
    same_nan(std::uint16_t{0}, std::uint16_t{0x7F80}, std::uint16_t{0x7FC0});
  } else {
    same_nan(std::uint16_t{0}, std::uint16_t{0x7C00}, std::uint16_t{0x7E00});
  }
  return crc32(bytes);
}

nlohmann::json expected() {
  std::ifstream file(kGolden + "quantized/expected.json");
  return nlohmann::json::parse(file);
}

class Dequantize : public testing::TestWithParam<CheckpointKind> {};

TEST_P(Dequantize, GivesWhatTheFormatsDefine) {
  const std::string root = temporary_directory();
  // Through a DCP checkpoint too: there the elements come in items with checksums.
  ConvertOptions copy;
  copy.to = GetParam();
  const std::string source = root + (GetParam() == CheckpointKind::dcp ? "/dcp" : "/a.safetensors");
  (void)convert(kGolden + "quantized", source, copy);
  const nlohmann::json all = expected();
  for (const auto& [dtype, names] : all.items()) {
    ConvertOptions options;
    options.dequantize = dtype_from_torch(dtype);
    options.memory = 1;  // the smallest windows
    std::string target = root;
    target.append("/").append(dtype).append(".safetensors");
    (void)convert(source, target, options);
    const Checkpoint checkpoint = Checkpoint::open(target);
    EXPECT_EQ(checkpoint.leaves.size(), names.size() + 2);
    const Value tree = checkpoint.load();
    for (const auto& [name, row] : names.items()) {
      const Leaf* leaf = checkpoint.find(name);
      ASSERT_NE(leaf, nullptr) << name;
      const Tensor& tensor = tree.at(name).as_tensor();
      EXPECT_EQ(to_string(tensor.dtype), dtype) << name;
      EXPECT_EQ(tensor.shape, row.at("shape").get<Shape>()) << name;
      EXPECT_EQ(crc_of(tensor), row.at("crc32").get<std::uint32_t>()) << dtype << " " << name;
    }
    // Not quantized, or without scales: as they were.
    EXPECT_EQ(tree.at("n").as_tensor().dtype, DType::float32);
    EXPECT_EQ(tree.at("lone.weight").as_tensor().dtype, DType::float8_e4m3fn);
  }
}

INSTANTIATE_TEST_SUITE_P(From, Dequantize,
                         testing::Values(CheckpointKind::dcp, CheckpointKind::safetensors));

// Windows that begin and end anywhere, read twice and backwards.
TEST(Dequantize, ReadsAnyRange) {
  const Checkpoint checkpoint = Checkpoint::open(kGolden + "quantized");
  for (const Leaf& leaf : dequantized(checkpoint.leaves, DType::bfloat16)) {
    if (leaf.name != "a.weight" && leaf.name != "experts") continue;
    const Storage& storage = *leaf.value.as_tensor().pieces.at(0).storage;
    std::vector<std::byte> whole_bytes(storage.size);
    storage.source->read_at(0, whole_bytes);
    for (const std::size_t step : {1U, 7U, 96U}) {
      for (std::size_t at = storage.size; at > 200 * step && at + 900 > storage.size;) {
        at -= step;
        std::vector<std::byte> part(step);
        storage.source->read_at(at, part);
        EXPECT_EQ(std::memcmp(part.data(), whole_bytes.data() + at, step), 0) << at;
      }
    }
    std::vector<std::byte> beyond(2);
    EXPECT_THROW(storage.source->read_at(storage.size - 1, beyond), Error);
  }
}

Leaf leaf(const std::string& name, DType dtype, const Shape& shape) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  const auto bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
  tensor.pieces.push_back(Piece{whole(shape), memory(bytes), 0, {}, -1});
  return {name, Path{name}, Value(std::move(tensor))};
}

TEST(Dequantize, RefusesWhatDoesNotFit) {
  const auto code = [](const std::vector<Leaf>& leaves, DType to = DType::float32) {
    return code_of([&] { (void)dequantized(leaves, to); });
  };
  const Leaf weight = leaf("x.weight", DType::float8_e4m3fn, {129, 10});
  const auto scale = [](const Shape& shape, DType dtype = DType::float32) {
    return leaf("x.weight_scale_inv", dtype, shape);
  };
  EXPECT_EQ(code({weight, scale({1, 1})}), ErrorCode::mismatch);
  EXPECT_EQ(code({weight, scale({})}), ErrorCode::mismatch);
  EXPECT_EQ(code({weight, scale({2, 1}, DType::complex64)}), ErrorCode::unsupported);
  EXPECT_EQ(code({leaf("x.weight", DType::int32, {129, 10}), scale({2, 1})}),
            ErrorCode::unsupported);
  EXPECT_EQ(code({weight, scale({2, 1})}, DType::int8), ErrorCode::invalid_argument);

  const Leaf blocks = leaf("x_blocks", DType::uint8, {2, 3, 16});
  const auto exponents = [](const Shape& shape) { return leaf("x_scales", DType::uint8, shape); };
  EXPECT_EQ(code({blocks, exponents({2, 2})}), ErrorCode::mismatch);
  EXPECT_EQ(code({leaf("x_blocks", DType::float32, {2, 3, 16}), exponents({2, 3})}),
            ErrorCode::unsupported);
  EXPECT_EQ(code({blocks, exponents({2, 3}), leaf("x", DType::float32, {1})}), ErrorCode::conflict);
  EXPECT_EQ(dequantized({blocks, exponents({2, 3})}, DType::float32)[0].value.as_tensor().shape,
            (Shape{2, 96}));
}

TEST(SmallFloat, KnownValues) {
  const auto e4m3 = float8_values(DType::float8_e4m3fn);
  EXPECT_EQ(e4m3[0x7E], 448.0F);
  EXPECT_TRUE(std::isnan(e4m3[0x7F]));
  EXPECT_EQ(e4m3[0x01], std::ldexp(1.0F, -9));
  EXPECT_TRUE(std::signbit(e4m3[0x80]));
  EXPECT_TRUE(std::isinf(float8_values(DType::float8_e5m2)[0x7C]));
  EXPECT_TRUE(std::isnan(float8_values(DType::float8_e4m3fnuz)[0x80]));
  EXPECT_EQ(float8_values(DType::float8_e4m3fnuz)[0x7F], 240.0F);
  EXPECT_EQ(float8_values(DType::float8_e5m2fnuz)[0x7F], 57344.0F);
  EXPECT_EQ(code_of([] { (void)float8_values(DType::int8); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
