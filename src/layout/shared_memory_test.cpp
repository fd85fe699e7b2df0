// Arrays in memory: whatever is said of two is what a look at each of their bytes says.
#include "layout/shared_memory.h"

#include <gtest/gtest.h>

#include <bitset>
#include <numeric>
#include <random>

namespace tessera {
namespace {

struct Array {
  std::uint64_t address = 0;
  std::size_t element = 1;
  Shape sizes;
  Shape strides;

  [[nodiscard]] BytePattern bytes() const {
    return bytes_of_array(address, element, sizes, strides);
  }
};

constexpr std::size_t kMemory = 1 << 16;

// Each byte; none when two elements share one.
std::optional<std::bitset<kMemory>> each_byte(const Array& array) {
  std::bitset<kMemory> bytes;
  for (std::int64_t i = 0; i < numel(array.sizes); ++i) {
    std::int64_t rest = i, at = 0;
    for (std::size_t d = array.sizes.size(); d-- > 0; rest /= array.sizes[d])
      at += rest % array.sizes[d] * array.strides[d];
    for (std::size_t b = 0; b < array.element; ++b) {
      const std::size_t byte = array.address + static_cast<std::size_t>(at) * array.element + b;
      if (bytes.test(byte)) return std::nullopt;
      bytes.set(byte);
    }
  }
  return bytes;
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }

  // Of few elements, near the begin of the memory; strides of a matrix, or any.
  Array array() {
    Array made;
    made.element = std::size_t{1} << below(4);
    made.address = static_cast<std::uint64_t>(below(200)) * (below(3) > 0 ? made.element : 1);
    const std::int64_t width = 1 + below(12);
    std::int64_t stride = 1;
    for (std::int64_t n = below(4); n > 0; --n) {
      made.sizes.push_back(below(8));
      made.strides.push_back(below(2) > 0 ? stride : 1 + below(20));
      stride *= width;
    }
    return made;
  }

 private:
  std::mt19937_64 random_;
};

TEST(SharedMemory, IsWhatALookAtEachByteSays) {
  Draw draw(1);
  int shared = 0, apart = 0;
  while (shared + apart < 20000) {
    const Array a = draw.array(), b = draw.array();
    const auto bytes_a = each_byte(a), bytes_b = each_byte(b);
    if (!bytes_a || !bytes_b) continue;
    const bool expected = (*bytes_a & *bytes_b).any();
    ++(expected ? shared : apart);
    ASSERT_EQ(share_memory(a.bytes(), b.bytes()), expected)
        << a.address << "+" << to_string(a.sizes) << to_string(a.strides) << "x" << a.element
        << " and " << b.address << "+" << to_string(b.sizes) << to_string(b.strides) << "x"
        << b.element;
    ASSERT_EQ(share_memory(b.bytes(), a.bytes()), expected);
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(apart, 2000);
}

// Of matrices with billions of elements, too.
TEST(SharedMemory, OfColumnsOfOneMatrix) {
  constexpr std::int64_t kRows = std::int64_t{1} << 31, kColumns = 1000;
  const auto columns = [](std::uint64_t first, std::int64_t count) {
    return Array{4096 + first * 4, 4, {kRows, count}, {kColumns, 1}}.bytes();
  };
  EXPECT_FALSE(share_memory(columns(0, 500), columns(500, 500)));
  EXPECT_TRUE(share_memory(columns(0, 501), columns(500, 500)));
  // The last one goes on in the next row.
  EXPECT_FALSE(share_memory(columns(0, 10), columns(900, 100)));
  EXPECT_TRUE(share_memory(columns(0, 10), columns(900, 101)));
  const BytePattern real = Array{4096, 4, {kRows}, {2}}.bytes();
  EXPECT_FALSE(share_memory(real, Array{4100, 4, {kRows}, {2}}.bytes()));
  EXPECT_TRUE(share_memory(real, Array{4104, 4, {kRows}, {2}}.bytes()));
  EXPECT_TRUE(share_memory(real, Array{4099, 2, {kRows}, {4}}.bytes()));
}

// Strides that have nothing to do with each other, whose search gives up.
TEST(SharedMemory, OfStridesThatDoNotFit) {
  constexpr std::int64_t kCount = 200000;
  const Array odd{0, 1, {kCount}, {999}}, even{0, 1, {kCount}, {1000}};
  EXPECT_TRUE(share_memory(odd.bytes(), even.bytes()));
  // 999 i = 1000 j + 998 first has a solution at i = 2, j = 1.
  EXPECT_TRUE(share_memory(odd.bytes(), Array{998, 1, {kCount}, {1000}}.bytes()));
  // Multiples of 6 and of 10, and an odd number between them: no search of two unknowns ends soon.
  for (const std::uint64_t distance : {0U, 2U, 7U}) {
    const Array a{1 << 20, 1, {kCount, 2}, {6, 6 * kCount + 6}};
    const Array b{(1 << 20) + distance, 1, {kCount, 2}, {10, 10 * kCount + 10}};
    EXPECT_EQ(share_memory(a.bytes(), b.bytes()), distance != 7) << distance;
  }
}

TEST(SharedMemory, NothingSharesNothing) {
  const Array none{8, 4, {0, 3}, {3, 1}}, one{8, 4, {}, {}}, row{0, 4, {8}, {1}};
  EXPECT_FALSE(share_memory(none.bytes(), row.bytes()));
  EXPECT_TRUE(share_memory(one.bytes(), row.bytes()));
  EXPECT_EQ(row.bytes().steps.size(), 1U);
}

}  // namespace
}  // namespace tessera
