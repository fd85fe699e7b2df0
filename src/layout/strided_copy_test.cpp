#include "layout/strided_copy.h"

#include <cstring>
#include <random>

#include "layout/testing.h"

namespace tessera {
namespace {

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
