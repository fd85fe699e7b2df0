#include "value/storage_reader.h"

#include <complex>
#include <vector>

#include <gtest/gtest.h>

#include "conformance/device_conformance.h"
#include "conformance/errors.h"
#include "conformance/fake_device.h"

namespace tessera {

// torch's conjugate and negative bits (issue 15, 3.1).

namespace {

Piece bits(bool conj, bool neg) {
  Piece piece;
  piece.conj = conj;
  piece.neg = neg;
  return piece;
}

template <typename Element>
std::vector<Element> resolved(bool conj, bool neg, DType dtype, std::vector<Element> elements) {
  resolve_bits(bits(conj, neg), dtype, reinterpret_cast<std::byte*>(elements.data()),
               static_cast<std::int64_t>(elements.size()));
  return elements;
}

TEST(LazyBits, OfComplexNumbers) {
  using C = std::complex<double>;
  const std::vector<C> given = {{1, 2}, {-3, 0.5}};
  EXPECT_EQ(resolved(false, false, DType::complex128, given), given);
  EXPECT_EQ(resolved(true, false, DType::complex128, given), (std::vector<C>{{1, -2}, {-3, -0.5}}));
  EXPECT_EQ(resolved(false, true, DType::complex128, given), (std::vector<C>{{-1, -2}, {3, -0.5}}));
  EXPECT_EQ(resolved(true, true, DType::complex128, given), (std::vector<C>{{-1, 2}, {3, 0.5}}));
}

TEST(LazyBits, OfRealNumbersAndIntegers) {
  EXPECT_EQ(resolved<float>(true, false, DType::float32, {1, -2}), (std::vector<float>{1, -2}));
  EXPECT_EQ(resolved<float>(false, true, DType::float32, {1, -2}), (std::vector<float>{-1, 2}));
  EXPECT_EQ(resolved<std::uint16_t>(false, true, DType::bfloat16, {0x3f80, 0x8000}),
            (std::vector<std::uint16_t>{0xbf80, 0}));
  EXPECT_EQ(resolved<std::int64_t>(false, true, DType::int64, {5, INT64_MIN}),
            (std::vector<std::int64_t>{-5, INT64_MIN}));
  EXPECT_EQ(resolved<std::int8_t>(false, true, DType::int8, {5, -128, 0}),
            (std::vector<std::int8_t>{-5, -128, 0}));
  EXPECT_EQ(resolved<std::uint8_t>(false, true, DType::uint8, {5, 0}),
            (std::vector<std::uint8_t>{251, 0}));
}

TEST(LazyBits, TypesWithoutNegativesAreRefused) {
  EXPECT_EQ(code_of([] { resolved<std::uint8_t>(false, true, DType::bool8, {1}); }),
            ErrorCode::unsupported);
  EXPECT_EQ(code_of([] { resolved<std::uint8_t>(false, true, DType::float8_e4m3fn, {1}); }),
            ErrorCode::unsupported);
}

// Values that a test does not expect.
std::vector<std::byte> counted(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 1000);
  return bytes;
}

std::vector<std::byte> copied(ByteView bytes) {
  return {bytes.begin(), bytes.end()};
}

struct Fake {
  explicit Fake(std::size_t size)
      : bytes(counted(size)), memory(std::make_shared<FakeMemory>(device, bytes)) {}
  [[nodiscard]] ByteView part(std::size_t at, std::size_t size) const {
    return ByteView(bytes).subspan(at, size);
  }

  FakeDevice device;
  std::vector<std::byte> bytes;
  std::shared_ptr<FakeMemory> memory;
};

INSTANTIATE_TEST_SUITE_P(
    Fake, DeviceConformance, ::testing::Values([](const std::vector<std::byte>& bytes) {
      auto fake = std::make_shared<Fake>(0);
      fake->bytes = bytes;
      fake->memory = std::make_shared<FakeMemory>(fake->device, fake->bytes);
      return DeviceSubject{{fake, fake->memory.get()}, [fake] { return fake->bytes; }};
    }));

TEST(DeviceReader, CopiesTheNextWindowWhileOneIsUsed) {
  Fake fake(1000);
  DeviceReader reader(fake.memory, 100, 850);
  for (std::size_t at = 100; at < 850; at += 100) {
    const std::size_t size = std::min<std::size_t>(100, 850 - at);
    EXPECT_EQ(copied(reader.view(at, size)), copied(fake.part(at, size)));
    EXPECT_EQ(fake.device.open(), at + size < 850 ? 1 : 0) << at;
  }
  EXPECT_EQ(fake.device.copies(), 8);
  EXPECT_EQ(fake.device.most_window_bytes(), 200U);
}

TEST(DeviceReader, ReadsInAnyOrder) {
  Fake fake(5000);
  DeviceReader reader(fake.memory, 0, 5000);
  std::vector<std::byte> out(700);
  for (const std::size_t at : {0U, 700U, 4000U, 700U, 1400U, 0U, 4300U}) {
    reader.read(at, out);
    EXPECT_EQ(out, copied(fake.part(at, out.size()))) << at;
    EXPECT_EQ(copied(reader.view(at + 1, 3)), copied(fake.part(at + 1, 3)));
  }
  EXPECT_TRUE(reader.view(5000, 0).empty());
}

TEST(DeviceReader, MoreThanWasCopiedAheadIsCopiedAnew) {
  Fake fake(1000);
  DeviceReader reader(fake.memory, 0, 1000);
  EXPECT_EQ(copied(reader.view(0, 10)), copied(fake.part(0, 10)));
  EXPECT_EQ(copied(reader.view(10, 100)), copied(fake.part(10, 100)));
  EXPECT_EQ(copied(reader.view(110, 5)), copied(fake.part(110, 5)));
  EXPECT_EQ(copied(reader.view(115, 5)), copied(fake.part(115, 5)));
}

TEST(DeviceReader, RangesOfTheCallBeforeAreNotWrittenAgain) {
  constexpr std::size_t kSize = 2 << 20;
  Fake fake(kSize);
  DeviceReader reader(fake.memory, 0, kSize);
  std::vector<std::byte> before(kSize);
  std::vector<std::byte> after(kSize);
  const ReadRange first{0, before};
  reader.read_ranges({&first, 1});
  std::ranges::fill(before, std::byte{0});
  for (std::size_t at = 0; at < 30; at += 10) {
    EXPECT_EQ(reader.view(at, 10).size(), 10U);  // leaves a copy under way, in either window
    const ReadRange second{0, after};
    reader.read_ranges({&second, 1});
    EXPECT_TRUE(after == fake.bytes);
    EXPECT_TRUE(std::ranges::all_of(before, [](std::byte byte) { return byte == std::byte{0}; }));
  }
}

TEST(DeviceReader, LongReadsTakeTwoWindows) {
  constexpr std::size_t kSize = (5 << 20) + 3;
  Fake fake(kSize);
  DeviceReader reader(fake.memory, 0, kSize);
  std::vector<std::byte> out(kSize);
  reader.read(0, out);
  EXPECT_TRUE(out == fake.bytes);
  EXPECT_EQ(fake.device.most_window_bytes(), std::size_t{2} << 20);
  EXPECT_EQ(fake.device.open(), 0);
}

// Ranges of all sizes, some of them none and one of several windows.
std::vector<std::pair<std::size_t, std::size_t>> some_ranges() {
  std::vector<std::pair<std::size_t, std::size_t>> ranges = {{5, 0}};
  std::size_t at = 7;
  for (std::size_t i = 0; i < 2000; ++i) {
    const std::size_t size = i == 100 ? std::size_t{3} << 20 : i * 7919 % 3000;
    ranges.emplace_back(at, size);
    at += size + i % 5;
  }
  return ranges;
}

TEST(DeviceReader, PacksRangesIntoWindows) {
  const auto ranges = some_ranges();
  Fake fake(ranges.back().first + ranges.back().second);
  DeviceReader reader(fake.memory, 0, fake.bytes.size());
  EXPECT_EQ(reader.view(0, 10).size(), 10U);  // leaves a copy under way
  std::vector<std::vector<std::byte>> out;
  std::vector<ReadRange> reads;
  for (const auto& [at, size] : ranges) out.emplace_back(size);
  for (std::size_t i = 0; i < ranges.size(); ++i) reads.push_back({ranges[i].first, out[i]});
  reader.read_ranges(reads);
  for (std::size_t i = 0; i < ranges.size(); ++i)
    ASSERT_TRUE(out[i] == copied(fake.part(ranges[i].first, ranges[i].second))) << i;
  EXPECT_LE(fake.device.copies(), 2 + 7);  // of 6 MiB
  EXPECT_LE(fake.device.most_window_bytes(), std::size_t{2} << 20);
}

TEST(DeviceWriter, PacksRangesIntoWindows) {
  const auto ranges = some_ranges();
  Fake fake(ranges.back().first + ranges.back().second);
  std::vector<std::byte> expected = fake.bytes;
  std::vector<std::byte> from(fake.bytes.rbegin(), fake.bytes.rend());
  std::vector<WriteRange> writes;
  for (const auto& [at, size] : ranges) {
    writes.push_back({at, ByteView(from).subspan(at, size)});
    std::ranges::copy(writes.back().bytes, expected.begin() + static_cast<std::ptrdiff_t>(at));
  }
  DeviceWriter writer(fake.memory);
  writer.write_ranges(writes);
  std::ranges::fill(from, std::byte{0});
  writer.finish();
  EXPECT_TRUE(fake.bytes == expected);
  EXPECT_LE(fake.device.copies(), 7);
}

TEST(DeviceWriter, SendsOneWindowWhileTheNextIsFilled) {
  Fake fake(1000);
  const std::vector<std::byte> values(fake.bytes.rbegin(), fake.bytes.rend());
  DeviceWriter writer(fake.memory);
  for (std::size_t at = 0; at < 1000; at += 150) {
    const std::size_t size = std::min<std::size_t>(150, 1000 - at);
    const MutableByteView room = writer.room(size);
    EXPECT_EQ(fake.device.open(), at == 0 ? 0 : 1);
    std::ranges::copy(ByteView(values).subspan(at, size), room.begin());
    writer.send(at, size);
  }
  writer.finish();
  EXPECT_EQ(fake.bytes, values);
  EXPECT_EQ(fake.device.open(), 0);
}

TEST(DeviceWindows, AFailureIsToldOnce) {
  Fake fake(1000);
  DeviceReader reader(fake.memory, 0, 1000);
  fake.device.fail(2);
  EXPECT_EQ(copied(reader.view(0, 100)), copied(fake.part(0, 100)));
  try {
    reader.view(100, 100);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
  }
  EXPECT_EQ(copied(reader.view(100, 100)), copied(fake.part(100, 100)));
  DeviceWriter writer(fake.memory);
  fake.device.fail(1);
  EXPECT_EQ(writer.room(10).size(), 10U);
  writer.send(0, 10);
  EXPECT_THROW(writer.finish(), Error);
  writer.finish();
}

TEST(DeviceWindows, WhoeverGivesUpWaitsForTheCopies) {
  Fake fake(1000);
  {
    DeviceReader reader(fake.memory, 0, 1000);
    EXPECT_EQ(reader.view(0, 100).size(), 100U);
    DeviceWriter writer(fake.memory);
    std::ranges::fill(writer.room(10), std::byte{1});
    writer.send(0, 10);
    EXPECT_EQ(fake.device.open(), 2);
  }
  EXPECT_EQ(fake.device.open(), 0);
  EXPECT_EQ(fake.device.window_bytes(), 0U);
}

TEST(StorageReader, ReadsWhereverTheBytesAre) {
  Fake fake(1000);
  Storage held, read, copied_out;
  held.size = read.size = copied_out.size = 900;
  held.data = fake.bytes.data();
  read.source = memory_source(fake.bytes, "file");
  copied_out.device = fake.memory;
  std::vector<std::byte> scratch(70);
  for (const Storage* storage : {&held, &read, &copied_out}) {
    StorageReader reader(*storage);
    EXPECT_EQ(copied(reader.view(30, scratch)), copied(fake.part(30, 70)));
    std::vector<std::byte> out(800);
    reader.read(100, out);
    EXPECT_EQ(out, copied(fake.part(100, 800)));
    EXPECT_EQ(is_in_memory(*storage), storage != &read);
  }
  Storage nowhere;
  EXPECT_NO_THROW(StorageReader{nowhere});
  nowhere.size = 1;
  EXPECT_THROW(StorageReader{nowhere}, Error);
}

}  // namespace
}  // namespace tessera
