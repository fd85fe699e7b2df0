#include "comm/same_host/collectives.h"

#include <gtest/gtest.h>

#include <random>

#include "comm/same_host/testing.h"

namespace tessera::same_host {
namespace {

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
