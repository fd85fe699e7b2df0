#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/numbers.h"
#include "conformance/errors.h"
#include "same_host/same_host.h"
#include "testing.h"

namespace tessera::same_host {
namespace {

template <typename T>
std::vector<T> reduced(DType dtype, Reduction reduction, const std::vector<std::vector<T>>& ranks) {
  std::vector<const std::byte*> sources;
  for (const auto& rank : ranks) sources.push_back(reinterpret_cast<const std::byte*>(rank.data()));
  std::vector<T> out(ranks[0].size());
  reduce(dtype, reduction, sources, reinterpret_cast<std::byte*>(out.data()), out.size());
  return out;
}

template <typename T>
std::vector<std::vector<T>> random_ranks(std::size_t ranks, std::size_t elements) {
  std::mt19937 random(3);
  std::vector<std::vector<T>> all(ranks, std::vector<T>(elements));
  for (auto& rank : all) {
    for (auto& value : rank)
      value = static_cast<T>(static_cast<int>(random() % 2001) - 1000) / T{3};
  }
  return all;
}

// Sizes around a block and its parts.
template <typename T>
void check_number_type(DType dtype) {
  for (const std::size_t elements : {0, 1, 7, 511, 512, 513, 2000}) {
    for (const std::size_t ranks : {1, 2, 3, 4}) {
      const auto all = random_ranks<T>(ranks, elements);
      const auto sum = reduced(dtype, Reduction::sum, all);
      const auto low = reduced(dtype, Reduction::minimum, all);
      const auto high = reduced(dtype, Reduction::maximum, all);
      for (std::size_t i = 0; i < elements; ++i) {
        T total = all[0][i], least = all[0][i], most = all[0][i];
        for (std::size_t r = 1; r < ranks; ++r) {
          total = static_cast<T>(total + all[r][i]);
          least = std::min(least, all[r][i]);
          most = std::max(most, all[r][i]);
        }
        ASSERT_EQ(sum[i], total);
        ASSERT_EQ(low[i], least);
        ASSERT_EQ(high[i], most);
      }
    }
  }
}

TEST(Reduce, NumbersAreAddedInTheOrderOfRanks) {
  check_number_type<float>(DType::float32);
  check_number_type<double>(DType::float64);
  check_number_type<std::int8_t>(DType::int8);
  check_number_type<std::int16_t>(DType::int16);
  check_number_type<std::int32_t>(DType::int32);
  check_number_type<std::int64_t>(DType::int64);
  check_number_type<std::uint8_t>(DType::uint8);
  // An order that can be seen: 1e8 - 1e8 + 1 is 1, 1 + 1e8 - 1e8 is 0.
  EXPECT_EQ(reduced<float>(DType::float32, Reduction::sum, {{1e8F}, {-1e8F}, {1}})[0], 1);
  EXPECT_EQ(reduced<float>(DType::float32, Reduction::sum, {{1}, {1e8F}, {-1e8F}})[0], 0);
}

TEST(Reduce, ShortFloatsAreRoundedOnce) {
  const auto b = [](float value) { return std::vector<BFloat16>{BFloat16::from(value)}; };
  const auto h = [](float value) { return std::vector<Half>{Half::from(value)}; };
  // Rounded after each addition, both would stay at the first number.
  EXPECT_EQ(float(reduced<BFloat16>(DType::bfloat16, Reduction::sum, {b(256), b(1), b(1)})[0]),
            258);
  EXPECT_EQ(float(reduced<Half>(DType::float16, Reduction::sum, {h(2048), h(1), h(1)})[0]), 2050);
  EXPECT_EQ(float(reduced<BFloat16>(DType::bfloat16, Reduction::average, {b(3), b(4)})[0]), 3.5F);
  EXPECT_EQ(float(reduced<Half>(DType::float16, Reduction::maximum, {h(3), h(4)})[0]), 4);
}

TEST(Reduce, AveragesOfFloatsOnly) {
  EXPECT_EQ(reduced<float>(DType::float32, Reduction::average, {{1}, {2}, {6}})[0], 3);
  EXPECT_EQ(reduced<double>(DType::float64, Reduction::average, {{1}, {2}})[0], 1.5);
  EXPECT_FALSE(can_reduce(DType::int32, Reduction::average));
  EXPECT_FALSE(can_reduce(DType::complex64, Reduction::sum));
  EXPECT_EQ(code_of([] {
              reduced<int>(DType::int32, Reduction::average, {{1}, {2}});
            }),
            ErrorCode::unsupported);
  EXPECT_EQ(code_of([] {
              reduced<int>(DType::uint32, Reduction::sum, {{1}, {2}});
            }),
            ErrorCode::unsupported);
}

TEST(Reduce, IntegersWrapAndBoolsStayBools) {
  EXPECT_EQ(reduced<std::int8_t>(DType::int8, Reduction::sum, {{127}, {1}})[0], -128);
  const auto big = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduced<std::int64_t>(DType::int64, Reduction::sum, {{big}, {1}})[0], -big - 1);
  using Bools = std::vector<std::uint8_t>;
  const std::vector<Bools> bools{{0, 0, 1, 1}, {0, 1, 0, 1}};
  EXPECT_EQ(reduced(DType::bool8, Reduction::sum, bools), (Bools{0, 1, 1, 1}));
  EXPECT_EQ(reduced(DType::bool8, Reduction::maximum, bools), (Bools{0, 1, 1, 1}));
  EXPECT_EQ(reduced(DType::bool8, Reduction::minimum, bools), (Bools{0, 0, 0, 1}));
}

TEST(Reduce, NaNWinsAndTheResultMayReplaceASource) {
  const float nan = std::nanf("");
  for (const auto reduction : {Reduction::minimum, Reduction::maximum}) {
    EXPECT_TRUE(std::isnan(reduced<float>(DType::float32, reduction, {{nan}, {1}})[0]));
    EXPECT_TRUE(std::isnan(reduced<float>(DType::float32, reduction, {{1}, {nan}})[0]));
  }
  auto all = random_ranks<float>(3, 1300);
  const auto expected = reduced(DType::float32, Reduction::sum, all);
  std::vector<const std::byte*> sources;
  for (const auto& rank : all) sources.push_back(reinterpret_cast<const std::byte*>(rank.data()));
  reduce(DType::float32, Reduction::sum, sources, reinterpret_cast<std::byte*>(all[1].data()),
         1300);
  EXPECT_EQ(all[1], expected);
}

using namespace std::chrono_literals;
using Numbers = std::vector<std::int32_t>;

// Rank `rank`'s numbers of call `seed`.
Numbers numbers_of(int rank, int seed, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank * 7919 + seed));
  Numbers numbers(count);
  for (auto& number : numbers) number = static_cast<std::int32_t>(random() % 1000);
  return numbers;
}

const std::byte* in_of(const Numbers& numbers, std::size_t first = 0) {
  return reinterpret_cast<const std::byte*>(numbers.data() + first);
}
std::byte* out_of(Numbers& numbers, std::size_t first = 0) {
  return reinterpret_cast<std::byte*>(numbers.data() + first);
}

Numbers sum_of(int ranks, int seed, std::size_t count) {
  Numbers sum(count);
  for (int r = 0; r < ranks; ++r) {
    const auto numbers = numbers_of(r, seed, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += numbers[i];
  }
  return sum;
}

Numbers part_of(const Numbers& all, std::size_t first, std::size_t count) {
  return {all.begin() + static_cast<std::ptrdiff_t>(first),
          all.begin() + static_cast<std::ptrdiff_t>(first + count)};
}

// One call of each kind, with sizes that take none to many rounds; awaited in the order of
// `random`.
class Calls {
 public:
  Calls(Exchange& exchange, int seed, std::size_t count)
      : exchange_(exchange),
        ranks_(static_cast<std::size_t>(exchange.size())),
        seed_(seed),
        count_(count),
        root_(seed % exchange.size()),
        mine_(numbers_of(exchange.rank(), seed, count)),
        wide_(numbers_of(exchange.rank(), seed, count * ranks_)),
        gathered_(count * ranks_),
        collected_(exchange.rank() == root_ ? count * ranks_ : 0),
        part_(count),
        summed_(mine_),
        reduced_(count),
        told_(mine_) {}

  void run(std::mt19937& random) {
    const bool is_root = exchange_.rank() == root_;
    std::vector<std::byte*> all, here;
    std::vector<const std::byte*> parts;
    for (std::size_t r = 0; r < ranks_; ++r) {
      all.push_back(out_of(gathered_, r * count_));
      if (is_root) here.push_back(out_of(collected_, r * count_));
      parts.push_back(in_of(wide_, r * count_));
    }
    const auto bytes = count_ * sizeof(std::int32_t);
    const ReduceArguments sum{DType::int32, Reduction::sum, out_of(summed_), count_};
    const ReduceArguments slice{DType::int32, Reduction::sum, out_of(reduced_), count_};
    start(gather_call(exchange_, "all-gather", {in_of(mine_), all, bytes, kEveryone}));
    start(gather_call(exchange_, "gather", {in_of(mine_), here, bytes, root_}));
    start(all_reduce_call(exchange_, "sum", out_of(summed_), sum));
    start(barrier_call());
    start(reduce_scatter_call(exchange_, "slice", parts, slice));
    if (!is_root) parts.clear();
    start(scatter_call(exchange_, "scatter", {parts, out_of(part_), bytes, root_}));
    start(broadcast_call(exchange_, "broadcast", {out_of(told_), bytes, root_}));
    std::shuffle(numbers_.begin(), numbers_.end(), random);
    for (const auto number : numbers_) exchange_.wait(number, 10s);
  }

  void check() const {
    const auto rank = static_cast<std::size_t>(exchange_.rank());
    Numbers together;
    for (int r = 0; r < exchange_.size(); ++r) {
      const auto numbers = numbers_of(r, seed_, count_);
      together.insert(together.end(), numbers.begin(), numbers.end());
    }
    EXPECT_EQ(gathered_, together);
    EXPECT_EQ(collected_, exchange_.rank() == root_ ? together : Numbers());
    EXPECT_EQ(summed_, sum_of(exchange_.size(), seed_, count_));
    EXPECT_EQ(reduced_,
              part_of(sum_of(exchange_.size(), seed_, count_ * ranks_), rank * count_, count_));
    EXPECT_EQ(part_, part_of(numbers_of(root_, seed_, count_ * ranks_), rank * count_, count_));
    EXPECT_EQ(told_, numbers_of(root_, seed_, count_));
  }

 private:
  void start(Call call) { numbers_.push_back(exchange_.start(std::move(call))); }

  Exchange& exchange_;
  const std::size_t ranks_;
  const int seed_;
  const std::size_t count_;  // of numbers a rank
  const int root_;
  Numbers mine_, wide_, gathered_, collected_, part_, summed_, reduced_, told_;
  std::vector<std::uint64_t> numbers_;  // of the calls under way
};

TEST(Collectives, AllKindsUnderWayTogetherInAnyOrder) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_exchange(ranks, {.slots = 4, .slot_bytes = 256}, [](Exchange& exchange) {
      std::mt19937 random(static_cast<unsigned>(exchange.rank()));
      int seed = 0;
      for (const std::size_t count : {0, 1, 4, 15, 16, 17, 64, 65, 1000}) {
        Calls calls(exchange, ++seed, count);
        calls.run(random);
        calls.check();
      }
    });
  }
}

TEST(Collectives, InPlace) {
  run_exchange(3, {.slots = 2, .slot_bytes = 192}, [](Exchange& exchange) {
    const auto rank = static_cast<std::size_t>(exchange.rank());
    // Its own part is the input of a gather and the result of a reduction.
    Numbers gathered(300), wide = numbers_of(exchange.rank(), 5, 300);
    std::vector<std::byte*> outs;
    std::vector<const std::byte*> ins;
    for (std::size_t r = 0; r < 3; ++r) {
      outs.push_back(out_of(gathered, r * 100));
      ins.push_back(in_of(wide, r * 100));
    }
    const auto mine = numbers_of(exchange.rank(), 5, 100);
    std::copy(mine.begin(), mine.end(), gathered.begin() + static_cast<std::ptrdiff_t>(rank * 100));
    exchange.wait(exchange.start(gather_call(exchange, "g",
                                             {in_of(gathered, rank * 100), outs, 400, kEveryone})),
                  10s);
    exchange.wait(
        exchange.start(reduce_scatter_call(
            exchange, "r", ins, {DType::int32, Reduction::sum, out_of(wide, rank * 100), 100})),
        10s);
    for (int r = 0; r < 3; ++r)
      EXPECT_EQ(part_of(gathered, static_cast<std::size_t>(r) * 100, 100), numbers_of(r, 5, 100));
    EXPECT_EQ(part_of(wide, rank * 100, 100), part_of(sum_of(3, 5, 300), rank * 100, 100));
  });
}

TEST(Collectives, ASlotTooSmallForAllRanksIsRefused) {
  run_exchange(3, {.slots = 2, .slot_bytes = 64}, [](Exchange& exchange) {
    std::vector<const std::byte*> none(3);
    EXPECT_NO_THROW(static_cast<void>(reduce_scatter_call(exchange, "r", none, {})));
  });
  run_exchange(5, {.slots = 2, .slot_bytes = 64}, [](Exchange& exchange) {
    std::vector<const std::byte*> none(5);
    EXPECT_THROW(static_cast<void>(reduce_scatter_call(exchange, "r", none, {})), Error);
  });
}

}  // namespace
}  // namespace tessera::same_host
