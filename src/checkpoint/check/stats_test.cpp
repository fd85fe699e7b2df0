#include "tessera/stats.h"

#include <cmath>
#include <limits>
#include <random>

#include "checkpoint/check/tally.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

using Random = std::mt19937_64;
using Bytes = std::vector<std::byte>;

std::size_t below(Random& random, std::size_t end) {
  return static_cast<std::size_t>(random() % end);
}

// A whole tensor with these elements.
Tensor tensor_of(DType dtype, const Shape& shape, const Bytes& elements) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  Piece piece{whole(shape), memory(elements.size()), 0, {}, -1};
  std::copy(elements.begin(), elements.end(), piece.storage->data);
  tensor.pieces.push_back(std::move(piece));
  return tensor;
}

template <typename T>
Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<T>& elements) {
  const auto* bytes = reinterpret_cast<const std::byte*>(elements.data());
  return tensor_of(dtype, shape, Bytes(bytes, bytes + elements.size() * sizeof(T)));
}

// The part of a dense tensor in a slice, in memory of its own.
Piece part_of(const Tensor& tensor, const Slice& slice) {
  const std::size_t element = size_of(tensor.dtype);
  Piece part{slice, memory(static_cast<std::size_t>(numel(slice)) * element), 0, {}, -1};
  const RunSequence runs(slice, tensor.shape);
  for (std::int64_t r = 0; r < runs.size(); ++r) {
    const Run run = runs[r];
    std::memcpy(part.storage->data + static_cast<std::size_t>(run.local) * element,
                tensor.pieces[0].storage->data + static_cast<std::size_t>(run.global) * element,
                static_cast<std::size_t>(run.count) * element);
  }
  return part;
}

// The same tensor in several pieces: parts of one dimension, or runs of elements.
Tensor cut(const Tensor& tensor, Random& random) {
  Tensor made = tensor;
  if (tensor.shape.empty() || numel(tensor.shape) == 0) return made;
  made.pieces.clear();
  const auto parts = static_cast<std::int64_t>(1 + below(random, 5));
  const std::size_t dim = below(random, tensor.shape.size() + 1);
  const std::int64_t size = dim < tensor.shape.size() ? tensor.shape[dim] : numel(tensor.shape);
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = chunk_begin(size, parts, part);
    const std::int64_t end = chunk_begin(size, parts, part + 1);
    if (begin == end) continue;
    Slice slice = FlatRange{begin, end};
    if (dim < tensor.shape.size()) slice = chunk_of(whole(tensor.shape), dim, parts, part);
    made.pieces.push_back(part_of(tensor, slice));
  }
  return made;
}

// The same elements, in memory in the order of the last dimension first.
Tensor transposed_in_memory(const Tensor& tensor) {
  if (tensor.shape.size() != 2) return tensor;
  Tensor made = tensor;
  const std::int64_t rows = tensor.shape[0], columns = tensor.shape[1];
  const std::size_t element = size_of(tensor.dtype);
  const auto storage = memory(static_cast<std::size_t>(rows * columns) * element);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      std::memcpy(
          storage->data + static_cast<std::size_t>(c * rows + r) * element,
          tensor.pieces[0].storage->data + static_cast<std::size_t>(r * columns + c) * element,
          element);
    }
  }
  made.pieces[0].storage = storage;
  made.pieces[0].strides = {1, rows};
  return made;
}

TensorStats stats_of_tensor(const Tensor& tensor, int threads = 1) {
  Checkpoint checkpoint;
  checkpoint.leaves.push_back({"w", {std::string("w")}, Value(tensor)});
  checkpoint.leaves.push_back({"step", {std::string("step")}, Value(3)});
  const std::vector<TensorStats> stats = stats_of(checkpoint, {.threads = threads});
  EXPECT_EQ(stats.size(), 1U);
  return stats.at(0);
}

void expect_same(const TensorStats& a, const TensorStats& b) {
  EXPECT_EQ(a.elements, b.elements);
  EXPECT_EQ(a.numbers, b.numbers);
  EXPECT_EQ(a.nans, b.nans);
  EXPECT_EQ(a.positive_infinities, b.positive_infinities);
  EXPECT_EQ(a.negative_infinities, b.negative_infinities);
  EXPECT_EQ(a.first_not_finite, b.first_not_finite);
  EXPECT_EQ(a.zeros, b.zeros);
  EXPECT_EQ(a.smallest, b.smallest);
  EXPECT_EQ(a.largest, b.largest);
  EXPECT_EQ(a.mean, b.mean);
  EXPECT_EQ(a.deviation, b.deviation);
  EXPECT_EQ(a.norm, b.norm);
  EXPECT_EQ(a.exponents, b.exponents);
  EXPECT_EQ(a.median_exponent, b.median_exponent);
}

// All numbers of a dense tensor, by the conversions of other reads.
std::vector<double> numbers_of(const Tensor& tensor) {
  const std::byte* data = tensor.pieces[0].storage->data;
  const NumberForm form = form_of(tensor.dtype);
  const auto count = static_cast<std::size_t>(numel(tensor.shape)) * form.per_element;
  std::vector<double> numbers;
  if (form.dtype == DType::float4_e2m1fn_x2) {
    for (std::size_t i = 0; i < count; ++i) {
      numbers.push_back(kFloat4Values[std::to_integer<unsigned>(data[i]) & 15U]);
      numbers.push_back(kFloat4Values[std::to_integer<unsigned>(data[i]) >> 4U]);
    }
  } else if (is_small_float(form.dtype)) {
    const auto values = float8_values(form.dtype);
    for (std::size_t i = 0; i < count; ++i)
      numbers.push_back(values[std::to_integer<std::size_t>(data[i])]);
  } else {
    numbers.resize(count);
    cast(form.dtype, data, DType::float64, reinterpret_cast<std::byte*>(numbers.data()),
         static_cast<std::int64_t>(count));
  }
  return numbers;
}

void expect_near(const std::optional<double>& found, long double expected, long double scale) {
  ASSERT_TRUE(found.has_value());
  if (std::isinf(static_cast<double>(expected))) {
    EXPECT_EQ(*found, static_cast<double>(expected));
    return;
  }
  EXPECT_LE(std::abs(*found - expected), 1e-12L * scale) << *found << " " << expected;
}

struct Expected {
  std::vector<double> finite;
  std::uint64_t nans = 0, positive = 0, negative = 0, zeros = 0;
  std::optional<std::size_t> first;
  std::array<std::uint64_t, TensorStats::kBins> exponents{};
};

Expected expected_of(const std::vector<double>& numbers) {
  Expected expected;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double number = numbers[i];
    if (!std::isfinite(number)) {
      if (!expected.first) expected.first = i;
      std::isnan(number) ? ++expected.nans : ++(number > 0 ? expected.positive : expected.negative);
      continue;
    }
    expected.finite.push_back(number);
    if (number == 0) {
      ++expected.zeros;
      continue;
    }
    const int bin = std::clamp(std::ilogb(number), -47, 16) + 47;
    ++expected.exponents.at(static_cast<std::size_t>(bin));
  }
  return expected;
}

// Against plain sums, which are as precise as can be.
void expect_right(const Tensor& tensor, const TensorStats& stats) {
  const std::vector<double> numbers = numbers_of(tensor);
  const Expected expected = expected_of(numbers);
  EXPECT_EQ(stats.numbers, numbers.size());
  EXPECT_EQ(stats.nans, expected.nans);
  EXPECT_EQ(stats.positive_infinities, expected.positive);
  EXPECT_EQ(stats.negative_infinities, expected.negative);
  EXPECT_EQ(stats.zeros, expected.zeros);
  EXPECT_EQ(stats.exponents, expected.exponents);
  ASSERT_EQ(stats.first_not_finite.has_value(), expected.first.has_value());
  if (expected.first) {
    const auto element = *expected.first / form_of(tensor.dtype).per_element;
    EXPECT_EQ(*stats.first_not_finite, index_at(tensor.shape, static_cast<std::int64_t>(element)));
  }
  EXPECT_EQ(stats.mean.has_value(), !expected.finite.empty());
  if (expected.finite.empty()) return;
  const auto count = static_cast<long double>(expected.finite.size());
  long double sum = 0, all_squares = 0, squares = 0;
  for (const double number : expected.finite) {
    sum += number;
    all_squares += static_cast<long double>(number) * number;
  }
  for (const double number : expected.finite) {
    const long double difference = number - sum / count;
    squares += difference * difference;
  }
  const long double scale = std::sqrt(all_squares / count);
  expect_near(stats.mean, sum / count, scale);
  expect_near(stats.deviation, std::sqrt(squares / count), std::max(scale, 0.0L));
  expect_near(stats.norm, std::sqrt(all_squares), std::sqrt(all_squares));
  EXPECT_EQ(stats.smallest->as_real(), std::ranges::min(expected.finite));
  EXPECT_EQ(stats.largest->as_real(), std::ranges::max(expected.finite));
}

Bytes random_bits(std::size_t size, Random& random) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Numbers like weights, as the dtype has them.
Bytes weights(DType dtype, std::size_t count, Random& random) {
  std::normal_distribution<double> normal(0.5, 3);
  std::vector<double> numbers(count);
  for (double& number : numbers) number = normal(random);
  Bytes bytes(count * size_of(dtype));
  cast(DType::float64, reinterpret_cast<const std::byte*>(numbers.data()), dtype, bytes.data(),
       static_cast<std::int64_t>(count));
  return bytes;
}

TEST(Stats, RandomTensorsInAnyPiecesOnAnyThreads) {
  Random random(20);
  for (int round = 0; round < 400; ++round) {
    const DType dtype = dtype_table()[below(random, dtype_table().size())].dtype;
    Shape shape;
    for (std::size_t dims = below(random, 4); dims > 0; --dims)
      shape.push_back(static_cast<std::int64_t>(below(random, round % 20 == 0 ? 90 : 20)));
    const auto count = static_cast<std::size_t>(numel(shape));
    const bool is_nice = can_cast(dtype, DType::float64) && round % 3 != 0;
    const Tensor tensor = tensor_of(
        dtype, shape,
        is_nice ? weights(dtype, count, random) : random_bits(count * size_of(dtype), random));
    SCOPED_TRACE(std::to_string(round) + " " + std::string(to_string(dtype)) + to_string(shape));
    const TensorStats stats = stats_of_tensor(tensor);
    EXPECT_EQ(stats.name, "w");
    EXPECT_EQ(stats.elements, count);
    expect_right(tensor, stats);
    for (const int threads : {1, 2, 5})
      expect_same(stats, stats_of_tensor(cut(tensor, random), threads));
    expect_same(stats, stats_of_tensor(transposed_in_memory(tensor), 2));
  }
}

TEST(Stats, EqualBitsForAnyNumberOfThreadsOfLargeTensors) {
  Random random(21);
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float8_e4m3fn, DType::int64}) {
    SCOPED_TRACE(to_string(dtype));
    // Two parts and a bit.
    const auto columns = static_cast<std::int64_t>((16U << 20U) / size_of(dtype) / 1000);
    const Shape shape{2001, columns};
    const auto count = static_cast<std::size_t>(numel(shape));
    const Tensor tensor = tensor_of(
        dtype, shape,
        is_small_float(dtype) ? random_bits(count, random) : weights(dtype, count, random));
    const TensorStats stats = stats_of_tensor(tensor);
    expect_right(tensor, stats);
    for (int threads = 2; threads <= 8; threads += 2) {
      expect_same(stats, stats_of_tensor(tensor, threads));
      expect_same(stats, stats_of_tensor(cut(tensor, random), threads));
    }
  }
}

template <typename T>
void expect_found(DType dtype, const std::vector<T>& patterns) {
  for (const T pattern : patterns) {
    for (const std::int64_t at : {0, 77, 5'000, 199'999}) {
      std::vector<T> elements(200'000, T{0});
      elements[static_cast<std::size_t>(at)] = pattern;
      const TensorStats stats = stats_of_tensor(tensor_of(dtype, {1000, 200}, elements), 2);
      SCOPED_TRACE(to_string(dtype));
      EXPECT_EQ(stats.nans + stats.positive_infinities + stats.negative_infinities, 1U);
      EXPECT_EQ(stats.first_not_finite, (Shape{at / 200, at % 200}));
      EXPECT_EQ(stats.suspicion(), Suspicion::not_finite);
    }
  }
}

TEST(Stats, OneOddNumberIsFoundInEachType) {
  expect_found<std::uint64_t>(DType::float64,
                              {0x7ff8000000000000, 0xfff0000000000000, 0x7ff0000000000001});
  expect_found<std::uint32_t>(DType::float32,
                              {0x7fc00000, 0xffc00001, 0x7f800000, 0xff800000, 0x7f800001});
  expect_found<std::uint16_t>(DType::float16, {0x7c00, 0xfc00, 0x7e00, 0xfc01});
  expect_found<std::uint16_t>(DType::bfloat16, {0x7f80, 0xff80, 0x7fc0, 0xffff});
  expect_found<std::uint8_t>(DType::float8_e4m3fn, {0x7f, 0xff});
  expect_found<std::uint8_t>(DType::float8_e5m2, {0x7c, 0xfc, 0x7d, 0xff});
  expect_found<std::uint8_t>(DType::float8_e4m3fnuz, {0x80});
  expect_found<std::uint8_t>(DType::float8_e5m2fnuz, {0x80});
  expect_found<std::uint8_t>(DType::float8_e8m0fnu, {0xff});
  expect_found<std::uint64_t>(DType::complex64, {0x7fc0000000000000, 0x000000007f800000});
}

TEST(Stats, OddNumbersBehindTheFirstPart) {
  std::vector<float> elements(5 << 20, 1.0F);
  elements[(4 << 20) + 12] = std::numeric_limits<float>::quiet_NaN();
  elements[(4 << 20) + 13] = -std::numeric_limits<float>::infinity();
  const TensorStats stats = stats_of_tensor(tensor_of(DType::float32, {5 << 20}, elements), 2);
  EXPECT_EQ(stats.nans, 1U);
  EXPECT_EQ(stats.negative_infinities, 1U);
  EXPECT_EQ(stats.first_not_finite, (Shape{(4 << 20) + 12}));
  EXPECT_EQ(stats.mean, 1.0);
  EXPECT_EQ(stats.deviation, 0.0);
}

TEST(Stats, NumbersWhoseSquaresLeaveFloat64) {
  const auto of = [](std::vector<double> numbers) {
    return stats_of_tensor(
        tensor_of(DType::float64, {static_cast<std::int64_t>(numbers.size())}, numbers));
  };
  EXPECT_EQ(of({3e200, 4e200}).norm, 5e200);
  EXPECT_EQ(of({3e200, 4e200}).mean, 3.5e200);
  EXPECT_DOUBLE_EQ(*of({3e-200, -4e-200}).norm, 5e-200);
  EXPECT_DOUBLE_EQ(*of({-1.5e308, 1.5e308}).deviation, 1.5e308);
  EXPECT_EQ(of({-1.5e308, 1.5e308}).mean, 0.0);
  EXPECT_EQ(of({5e-324, 5e-324}).mean, 5e-324);
  EXPECT_EQ(of({5e-324, 0}).zeros, 1U);
}

TEST(Stats, IntegersOf64BitsKeepTheirEnds) {
  const TensorStats with_sign = stats_of_tensor(tensor_of<std::int64_t>(
      DType::int64, {3}, {std::numeric_limits<std::int64_t>::min(), 9007199254740993, -1}));
  EXPECT_EQ(with_sign.smallest, Value(std::numeric_limits<std::int64_t>::min()));
  EXPECT_EQ(with_sign.largest, Value(std::int64_t{9007199254740993}));
  const TensorStats without = stats_of_tensor(
      tensor_of<std::uint64_t>(DType::uint64, {2}, {~std::uint64_t{0}, 9007199254740993}));
  EXPECT_EQ(without.smallest, Value(std::uint64_t{9007199254740993}));
  EXPECT_EQ(without.largest, Value(~std::uint64_t{0}));
}

Suspicion suspicion_of(const std::vector<float>& numbers) {
  return stats_of_tensor(
             tensor_of(DType::float32, {static_cast<std::int64_t>(numbers.size())}, numbers))
      .suspicion();
}

TEST(Stats, Suspicions) {
  EXPECT_EQ(suspicion_of({}), Suspicion::empty);
  EXPECT_EQ(suspicion_of({0, -0.0F}), Suspicion::zero);
  EXPECT_EQ(suspicion_of({7, 7}), Suspicion::constant);
  EXPECT_EQ(suspicion_of({7}), Suspicion::none);
  EXPECT_EQ(suspicion_of({7, 8}), Suspicion::none);
  EXPECT_EQ(suspicion_of({1e-16F, -2e-16F, 1}), Suspicion::tiny);
  EXPECT_EQ(suspicion_of({1e-15F, -2e-15F, 1}), Suspicion::none);
  EXPECT_EQ(suspicion_of({1e16F, 1e17F, 1}), Suspicion::huge);
  EXPECT_EQ(suspicion_of({1e38F, std::numeric_limits<float>::infinity()}), Suspicion::not_finite);
}

TEST(Stats, BitsOfAQuantizedStorageAreNoNumbers) {
  Tensor tensor = tensor_of<std::int8_t>(DType::int8, {3}, {1, 2, 3});
  tensor.pieces[0].storage->torch_class = "QInt8Storage";
  const TensorStats stats = stats_of_tensor(tensor);
  EXPECT_EQ(stats.elements, 3U);
  EXPECT_EQ(stats.numbers, 0U);
  EXPECT_FALSE(stats.mean.has_value());
  EXPECT_EQ(stats.suspicion(), Suspicion::no_numbers);
}

TEST(Stats, OfFilesOfEachKindAndDamage) {
  Random random(22);
  const Tensor tensor =
      tensor_of(DType::float32, {300, 100}, weights(DType::float32, 30'000, random));
  Value tree = Value::dict();
  tree.set_item("w", Value(tensor));
  tree.set_item("pair", Value::tuple({Value(tensor), Value(1)}));
  const TensorStats expected = stats_of_tensor(tensor);
  for (const char* name : {"/a.pt", "/a.safetensors", "/a"}) {
    const std::string path = temporary_directory() + name;
    save(tree, path);
    const std::vector<TensorStats> stats = stats_of(Checkpoint::open(path), {.threads = 3});
    ASSERT_EQ(stats.size(), 1U);
    expect_same(expected, stats[0]);
  }
  SaveOptions compressed;
  compressed.compression = Compression::zstd;
  const std::string path = temporary_directory() + "/z";
  save(tree, path, compressed);
  expect_same(expected, stats_of(Checkpoint::open(path)).at(0));

  const std::string damaged = temporary_directory() + "/d.pt";
  save(tree, damaged);
  std::string text = text_of(damaged);
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
  write_text(damaged, text);
  EXPECT_EQ(code_of([&] { (void)stats_of(Checkpoint::open(damaged)); }), ErrorCode::corrupt);
}

TEST(Stats, EndsWhenAskedToAndRefusesThreads) {
  Checkpoint checkpoint;
  checkpoint.leaves.push_back({"w", {std::string("w")}, Value(counting({4}, whole({4}), 0))});
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(code_of([&] { (void)stats_of(checkpoint, {.stop = stop.get_token()}); }),
            ErrorCode::cancelled);
  EXPECT_EQ(code_of([&] { (void)stats_of(checkpoint, {.threads = 0}); }),
            ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
