// Everything against brute force, one element at a time, on small random tensors. Seeded: a failure
// repeats.
#include <algorithm>
#include <map>
#include <random>

#include "layout/plan.h"
#include "layout/strided.h"
#include "layout/testing.h"

namespace tessera {
namespace {

constexpr int kRounds = 3000;

class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  // A number in [low, high].
  std::int64_t operator()(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

 private:
  std::mt19937 engine_;
};

Shape random_shape(Dice& dice) {
  Shape shape(static_cast<std::size_t>(dice(0, 4)));
  for (auto& size : shape) size = dice(0, 9) == 0 ? 0 : dice(1, 5);
  return shape;
}

// Cuts `box` at random places until chance ends it: always an exact partition, empty parts
// included.
void split(Dice& dice, const Box& box, std::vector<Slice>& parts) {
  if (box.sizes.empty() || dice(0, 4) > 1) {
    parts.push_back(box);
    return;
  }
  const auto d = static_cast<std::size_t>(dice(0, static_cast<std::int64_t>(box.sizes.size()) - 1));
  const std::int64_t at = dice(0, box.sizes[d]);
  Box low = box;
  Box high = box;
  low.sizes[d] = at;
  high.offsets[d] += at;
  high.sizes[d] -= at;
  split(dice, low, parts);
  split(dice, high, parts);
}

std::vector<Slice> random_partition(Dice& dice, const Shape& shape) {
  std::vector<Slice> parts;
  if (dice(0, 1) == 0) {
    split(dice, whole(shape), parts);
  } else {
    std::int64_t begin = 0;
    while (begin < numel(shape)) {
      const std::int64_t end = dice(begin, numel(shape));
      parts.push_back(FlatRange{begin, end});
      begin = end;
    }
  }
  std::shuffle(parts.begin(), parts.end(), std::mt19937(static_cast<unsigned>(dice(0, 1000))));
  return parts;
}

bool holds(const Slice& slice, const Shape& index, std::int64_t global) {
  if (const FlatRange* range = std::get_if<FlatRange>(&slice)) {
    return range->begin <= global && global < range->end;
  }
  const Box& box = std::get<Box>(slice);
  for (std::size_t d = 0; d < index.size(); ++d) {
    if (index[d] < box.offsets[d] || index[d] >= box.offsets[d] + box.sizes[d]) return false;
  }
  return true;
}

// The global positions of a slice's elements in its own order, by testing every element.
std::vector<std::int64_t> elements(const Slice& slice, const Shape& shape) {
  std::vector<std::int64_t> found;
  for (std::int64_t global = 0; global < numel(shape); ++global) {
    Shape index(shape.size());
    std::int64_t rest = global;
    for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) index[d] = rest % shape[d];
    if (holds(slice, index, global)) found.push_back(global);
  }
  return found;
}

TEST(LayoutProperty, RunsAreTheMaximalRunsOfTheSlice) {
  Dice dice(1);
  for (int round = 0; round < kRounds; ++round) {
    const Shape shape = random_shape(dice);
    for (const Slice& slice : random_partition(dice, shape)) {
      std::vector<std::int64_t> seen;
      std::int64_t last_end = -1;
      for (const tessera::Run& run : runs_of(slice, shape)) {
        ASSERT_EQ(run.local, static_cast<std::int64_t>(seen.size()));
        ASSERT_GT(run.global, last_end) << "runs touch";
        last_end = run.global + run.count;
        for (std::int64_t i = 0; i < run.count; ++i) seen.push_back(run.global + i);
      }
      ASSERT_EQ(seen, elements(slice, shape)) << to_string(slice) << " of " << to_string(shape);
    }
  }
}

// Every target element is filled at most once, from the lowest source that holds it.
TEST(LayoutProperty, PlansMoveEveryElement) {
  Dice dice(2);
  for (int round = 0; round < kRounds; ++round) {
    const Shape shape = random_shape(dice);
    std::vector<Slice> from = random_partition(dice, shape);
    if (dice(0, 1) == 0) {
      for (Slice& replica : random_partition(dice, shape)) from.push_back(std::move(replica));
    }
    if (!from.empty() && dice(0, 3) == 0) from.pop_back();
    const std::vector<Slice> to = random_partition(dice, shape);

    std::map<std::int64_t, std::pair<std::size_t, std::int64_t>> served;  // global -> piece, local
    for (std::size_t piece = 0; piece < from.size(); ++piece) {
      std::int64_t local = 0;
      for (const std::int64_t global : elements(from[piece], shape)) {
        served.emplace(global, std::make_pair(piece, local++));
      }
    }
    std::vector<Copy> expected;
    bool complete = true;
    for (std::size_t piece = 0; piece < to.size(); ++piece) {
      std::int64_t local = -1;
      for (const std::int64_t global : elements(to[piece], shape)) {
        ++local;
        const auto found = served.find(global);
        complete = complete && found != served.end();
        if (found == served.end()) continue;
        expected.push_back({found->second.first, piece, found->second.second, local, 1});
      }
    }
    const std::vector<Copy> plan = plan_copies(shape, from, to);
    std::vector<Copy> single;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      for (std::int64_t k = 0; k < plan[i].count; ++k) {
        Copy one = plan[i];
        one.from_local += k;
        one.to_local += k;
        one.count = 1;
        single.push_back(one);
      }
      if (i == 0) continue;
      const Copy& before = plan[i - 1];
      ASSERT_FALSE(before.from == plan[i].from && before.to == plan[i].to &&
                   before.from_local + before.count == plan[i].from_local &&
                   before.to_local + before.count == plan[i].to_local)
          << "neighbours that should be one copy";
    }
    ASSERT_EQ(single, expected) << "round " << round << ", shape " << to_string(shape);
    if (complete) {
      require_filled(shape, to, plan);
    } else {
      ASSERT_EQ(error_of([&] { require_filled(shape, to, plan); }).code(), ErrorCode::incomplete);
    }
  }
}

TEST(LayoutProperty, CoverFindsTheFirstFault) {
  Dice dice(3);
  int faults = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Shape shape = random_shape(dice);
    std::vector<Slice> pieces = random_partition(dice, shape);
    if (dice(0, 2) == 0) {
      for (Slice& extra : random_partition(dice, shape)) pieces.push_back(std::move(extra));
      std::shuffle(pieces.begin(), pieces.end(), std::mt19937(7));
      pieces.resize(pieces.size() / 2);
    }
    std::map<std::int64_t, int> holders;
    for (const Slice& piece : pieces) {
      for (const std::int64_t global : elements(piece, shape)) ++holders[global];
    }
    std::int64_t first = 0;
    while (first < numel(shape) && holders[first] == 1) ++first;
    if (first == numel(shape)) {
      require_covered_once(shape, pieces);
      continue;
    }
    ++faults;
    const Error error = error_of([&] { require_covered_once(shape, pieces); });
    ASSERT_EQ(error.code(), holders[first] == 0 ? ErrorCode::incomplete : ErrorCode::conflict);
    Shape index(shape.size());
    for (std::size_t d = shape.size(); d-- > 0; first /= shape[d]) index[d] = first % shape[d];
    ASSERT_TRUE(error.message().starts_with("element " + to_string(index) + " of")) << error.what();
  }
  EXPECT_GT(faults, kRounds / 10);
}

TEST(LayoutProperty, StridedRunsAreMaximal) {
  Dice dice(4);
  for (int round = 0; round < kRounds; ++round) {
    const Shape sizes = random_shape(dice);
    Shape strides = contiguous_strides(sizes);
    if (dice(0, 2) > 0) {
      for (auto& stride : strides) stride = dice(-1, 6);
    }
    const std::int64_t begin = dice(0, numel(sizes));
    const std::int64_t count = dice(0, numel(sizes) - begin);
    std::vector<std::int64_t> expected;
    for (std::int64_t i = begin; i < begin + count; ++i) {
      std::int64_t position = 0;
      std::int64_t rest = i;
      for (std::size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) {
        position += rest % sizes[d] * strides[d];
      }
      expected.push_back(position);
    }
    std::vector<std::int64_t> seen;
    for_each_strided_run(sizes, strides, begin, count, [&](std::int64_t position, std::int64_t n) {
      ASSERT_GT(n, 0);
      ASSERT_TRUE(seen.empty() || seen.back() + 1 != position) << "runs touch";
      for (std::int64_t i = 0; i < n; ++i) seen.push_back(position + i);
    });
    ASSERT_EQ(seen, expected) << to_string(sizes) << " strides " << to_string(strides);
  }
}

}  // namespace
}  // namespace tessera
