#include "layout/strided.h"

#include <bitset>
#include <cstring>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "layout/testing.h"

namespace tessera {
namespace {

using Visits = std::vector<std::pair<std::int64_t, std::int64_t>>;

Visits visits(const Shape& sizes, const Shape& strides, std::int64_t begin, std::int64_t count) {
  Visits seen;
  for_each_strided_run(sizes, strides, begin, count, [&](std::int64_t position, std::int64_t n) {
    seen.emplace_back(position, n);
  });
  return seen;
}

TEST(StridedRun, DenseArraysAreOneRun) {
  EXPECT_EQ(visits({}, {}, 0, 1), (Visits{{0, 1}}));
  EXPECT_EQ(visits({2, 3}, {3, 1}, 0, 6), (Visits{{0, 6}}));
  EXPECT_EQ(visits({2, 3}, {3, 1}, 2, 3), (Visits{{2, 3}}));
  EXPECT_EQ(visits({1, 3, 1}, {77, 1, 99}, 0, 3), (Visits{{0, 3}}));
  EXPECT_TRUE(visits({2, 0}, {0, 1}, 0, 0).empty());
}

TEST(StridedRun, GapsSeparateRows) {
  EXPECT_EQ(visits({3, 2}, {5, 1}, 1, 4), (Visits{{1, 1}, {5, 2}, {10, 1}}));
  EXPECT_EQ(visits({2, 2}, {1, 2}, 0, 4), (Visits{{0, 1}, {2, 1}, {1, 1}, {3, 1}}));
}

TEST(StridedRun, ExpandedAndNegativeStridesWork) {
  EXPECT_EQ(visits({2, 3}, {0, 1}, 0, 6), (Visits{{0, 3}, {0, 3}}));
  EXPECT_EQ(visits({3}, {-1}, 0, 3), (Visits{{0, 1}, {-1, 1}, {-2, 1}}));
}

TEST(StridedRun, RunsAreMaximalAcrossRows) {
  EXPECT_EQ(visits({2, 2}, {3, 2}, 0, 4), (Visits{{0, 1}, {2, 2}, {5, 1}}));
}

TEST(StridedRun, BadRequestsAreRefused) {
  const auto code = [](const Shape& sizes, const Shape& strides, std::int64_t begin,
                       std::int64_t n) {
    return error_of([&] { (void)visits(sizes, strides, begin, n); }).code();
  };
  EXPECT_EQ(code({2}, {1, 1}, 0, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code({2}, {1}, 1, 2), ErrorCode::invalid_argument);
  EXPECT_EQ(code({2}, {1}, -1, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code({2, 0}, {1, 1}, 0, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code({3, 2}, {INT64_MAX, 1}, 0, 6), ErrorCode::limit);
  EXPECT_EQ(code({2, 2}, {INT64_MAX, 1}, 0, 4), ErrorCode::limit);
}

}  // namespace

// Arrays in memory: whatever is said of two is what a look at each of their bytes says.

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

  // An array of few elements, near the begin of the memory; strides of a matrix, or any.
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

// It holds for matrices with billions of elements, too.
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

// Element by element, as the header defines it.
void copy_naively(const StridedMove& move, const std::byte* from, std::byte* to,
                  std::size_t element) {
  std::vector<std::int64_t> index(move.dims.size());
  while (true) {
    std::int64_t at = move.from;
    std::int64_t into = move.to;
    for (std::size_t d = 0; d < index.size(); ++d) {
      at += index[d] * move.dims[d].from;
      into += index[d] * move.dims[d].to;
    }
    std::memcpy(to + into * static_cast<std::int64_t>(element),
                from + at * static_cast<std::int64_t>(element), element);
    std::size_t d = index.size();
    for (; d > 0; --d) {
      if (++index[d - 1] < move.dims[d - 1].size) break;
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

// A move whose places to write are dense, in a random order of dimensions, and distinct.
StridedMove random_move(std::mt19937& rng) {
  const auto draw = [&rng](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
  };
  StridedMove move;
  const auto rank = static_cast<std::size_t>(draw(0, 4));
  const std::int64_t longest = rank <= 2 ? 150 : 12;
  for (std::size_t d = 0; d < rank; ++d) move.dims.push_back({draw(1, longest), 0, 0});
  std::vector<std::size_t> order(rank);
  for (const bool writing : {true, false}) {
    for (std::size_t d = 0; d < rank; ++d) order[d] = d;
    std::shuffle(order.begin(), order.end(), rng);
    std::int64_t stride = writing ? 1 : draw(1, 3);
    for (const std::size_t d : order) {
      (writing ? move.dims[d].to : move.dims[d].from) = stride;
      stride *= move.dims[d].size + (writing ? 0 : draw(0, 2));
    }
  }
  for (StridedDim& dim : move.dims) {
    if (draw(0, 5) == 0) dim.from = 0;
    if (draw(0, 5) != 0) continue;
    move.from += (dim.size - 1) * dim.from;
    dim.from = -dim.from;
  }
  return move;
}

TEST(StridedCopy, IsWhatItsDefinitionSays) {
  std::mt19937 rng(1);
  for (int round = 0; round < 400; ++round) {
    const StridedMove move = random_move(rng);
    const std::size_t element = std::size_t{1} << (round % 5);
    std::int64_t last = move.from;
    std::int64_t count = 1;
    for (const StridedDim& dim : move.dims) {
      last += std::max<std::int64_t>(0, dim.from) * (dim.size - 1);
      count *= dim.size;
    }
    std::vector<std::byte> from(static_cast<std::size_t>(last + 1) * element);
    for (std::byte& byte : from) byte = static_cast<std::byte>(rng());
    std::vector<std::byte> expected(static_cast<std::size_t>(count) * element, std::byte{7});
    std::vector<std::byte> found = expected;
    copy_naively(move, from.data(), expected.data(), element);
    copy_strided(normalized(move), from.data(), found.data(), element);
    ASSERT_EQ(found, expected) << "round " << round;
  }
}

TEST(StridedCopy, NormalizedMovesHaveTheFewestDimensions) {
  const auto dims = [](std::vector<StridedDim> given) {
    return normalized({0, 0, std::move(given)}).dims;
  };
  EXPECT_TRUE(dims({{1, 5, 7}, {1, 0, 9}}).empty());
  EXPECT_EQ(dims({{2, 12, 12}, {3, 4, 4}, {4, 1, 1}}), (std::vector<StridedDim>{{24, 1, 1}}));
  EXPECT_EQ(dims({{4, 1, 3}, {3, 4, 1}}), (std::vector<StridedDim>{{3, 4, 1}, {4, 1, 3}}));
  EXPECT_EQ(dims({{5, 0, 2}, {2, 3, 1}}), (std::vector<StridedDim>{{2, 3, 1}, {5, 0, 2}}));
  const StridedMove turned = normalized({9, 0, {{10, -1, 1}}});
  EXPECT_EQ(turned.from, 0);
  EXPECT_EQ(turned.to, 9);
  EXPECT_EQ(turned.dims, (std::vector<StridedDim>{{10, 1, -1}}));
}

TEST(StridedCopy, OtherElementsAreRefused) {
  std::byte bytes[3]{};
  EXPECT_EQ(error_of([&] { copy_strided({}, bytes, bytes, 3); }).code(),
            ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
