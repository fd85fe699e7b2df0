#include "tessera/distributed_sampler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <set>
#include <sstream>
#include <tuple>
#include <vector>

#include "conformance/errors.h"

namespace tessera {
namespace {

using Samples = std::vector<std::size_t>;

Samples rest_of(DistributedSampler& sampler, std::size_t batch = 2) {
  Samples all;
  while (const auto got = sampler.next(batch)) all.insert(all.end(), got->begin(), got->end());
  return all;
}

// What torch.utils.data.DistributedSampler gives each rank.
TEST(DistributedSampler, HasPyTorchsOrder) {
  struct Row {
    std::size_t size;
    int ranks;
    bool drop_last, shuffle;
    std::uint64_t seed, epoch;
    std::vector<Samples> samples;
  };
  const std::vector<Row> rows = {
      {10, 3, false, true, 7, 0, {{5, 4, 9, 2}, {0, 1, 6, 5}, {3, 7, 8, 0}}},
      {10, 3, false, true, 7, 2, {{0, 7, 9, 3}, {5, 6, 1, 0}, {8, 2, 4, 5}}},
      {10, 3, true, true, 7, 2, {{0, 7, 9}, {5, 6, 1}, {8, 2, 4}}},
      {5, 8, false, true, 0, 0, {{4}, {0}, {1}, {3}, {2}, {4}, {0}, {1}}},
      {7, 2, false, false, 3, 1, {{0, 2, 4, 6}, {1, 3, 5, 0}}},
      {3, 4, true, true, 1, 0, {{}, {}, {}, {}}},
  };
  for (const Row& row : rows) {
    for (int rank = 0; rank < row.ranks; ++rank) {
      DistributedSampler sampler(
          row.size, row.ranks, rank,
          {.shuffle = row.shuffle, .seed = row.seed, .drop_last = row.drop_last});
      sampler.set_epoch(row.epoch);
      EXPECT_EQ(sampler.left(), row.samples[rank].size());
      EXPECT_EQ(rest_of(sampler), row.samples[rank]) << row.size << ", rank " << rank;
      EXPECT_EQ(sampler.next(1), std::nullopt);
    }
  }
}

// Generated: whoever goes on, every sample of the epoch comes once, but for what fills up.
TEST(DistributedSampler, GoesOnWithWhatIsLeft) {
  std::mt19937 draw(5);
  for (int i = 0; i < 300; ++i) {
    const std::size_t size = draw() % 60;
    const int before = 1 + static_cast<int>(draw() % 7), after = 1 + static_cast<int>(draw() % 7);
    const DistributedSamplerOptions options{.shuffle = draw() % 2 == 0, .seed = draw() % 9};
    const std::size_t taken = draw() % (size + 1);
    std::vector<Samples> seen;
    Value state;
    for (int rank = 0; rank < before; ++rank) {
      DistributedSampler sampler(size, before, rank, options);
      sampler.set_epoch(3);
      seen.push_back(taken == 0 ? Samples() : sampler.next(taken).value_or(Samples()));
      const Value mine = sampler.state_dict();
      if (rank > 0) {
        EXPECT_EQ(mine, state);
      }
      state = mine;
    }
    std::multiset<std::size_t> all;
    for (const Samples& one : seen) all.insert(one.begin(), one.end());
    for (int rank = 0; rank < after; ++rank) {
      DistributedSampler sampler(size, after, rank, options);
      sampler.load_state_dict(state);
      sampler.reset();  // as a loader does first
      EXPECT_EQ(sampler.epoch(), 3U);
      const Samples mine = rest_of(sampler, 1 + draw() % 9);
      all.insert(mine.begin(), mine.end());
      if (before == after) {
        DistributedSampler whole(size, after, rank, options);
        whole.set_epoch(3);
        Samples both = seen[rank];
        both.insert(both.end(), mine.begin(), mine.end());
        EXPECT_EQ(both, rest_of(whole));
      }
    }
    EXPECT_EQ(std::set<std::size_t>(all.begin(), all.end()).size(), size);
    EXPECT_LT(all.size(), size + static_cast<std::size_t>(before + after));
  }
}

// `for epoch in range(start, n): sampler.set_epoch(epoch)`, which Python's programs write.
TEST(DistributedSampler, SettingTheEpochThatWasLoadedGoesOnWithIt) {
  constexpr std::uint64_t kEpochs = 4;
  const auto epochs_of = [](DistributedSampler& sampler, bool resets) {
    Samples all;
    for (auto epoch = sampler.epoch(); epoch < kEpochs; ++epoch) {
      sampler.set_epoch(epoch);
      if (resets) sampler.reset();  // as a loader does first
      const Samples some = rest_of(sampler, 2);
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  };
  for (const bool resets : {false, true}) {
    for (const std::size_t taken : {0U, 2U, 5U}) {  // of five
      DistributedSampler whole(10, 2, 1), first(10, 2, 1), second(10, 2, 1);
      for (auto* sampler : {&whole, &first}) {
        sampler->set_epoch(2);
        EXPECT_EQ(sampler->next(taken).value_or(Samples()).size(), taken);
      }
      second.load_state_dict(first.state_dict());
      EXPECT_EQ(second.left(), 5 - taken);
      Samples expected = rest_of(whole);
      whole.set_epoch(3);
      const Samples last = rest_of(whole);
      expected.insert(expected.end(), last.begin(), last.end());
      EXPECT_EQ(epochs_of(second, resets), expected) << taken;
    }
  }
}

TEST(DistributedSampler, AnEpochIsBegunAnewByItsNumber) {
  DistributedSampler sampler(10, 2, 1), other(10, 2, 1);
  const Samples whole = rest_of(sampler);
  sampler.set_epoch(0);
  EXPECT_EQ(rest_of(sampler), whole);  // a whole one is repeated
  sampler.set_epoch(0);
  sampler.next(2);
  other.load_state_dict(sampler.state_dict());
  sampler.set_epoch(0);
  EXPECT_EQ(rest_of(sampler), whole);  // and so is a part
  other.set_epoch(0);
  EXPECT_EQ(other.left(), 3U);
  other.next(1);
  other.set_epoch(0);
  EXPECT_EQ(rest_of(other), whole);
  // Another epoch than the one that was loaded.
  other.load_state_dict(sampler.state_dict());
  other.set_epoch(1);
  EXPECT_EQ(other.left(), 5U);
  other.set_epoch(0);
  EXPECT_EQ(rest_of(other), whole);
}

TEST(DistributedSampler, RefusesTheStateOfAnother) {
  DistributedSampler sampler(10, 2, 0, {.seed = 1});
  const Value state = sampler.state_dict();
  for (auto&& [size, seed, shuffle] : std::vector<std::tuple<std::size_t, std::uint64_t, bool>>{
           {11, 1, true}, {10, 2, true}, {10, 1, false}}) {
    DistributedSampler other(size, 2, 0, {.shuffle = shuffle, .seed = seed});
    EXPECT_EQ(code_of([&] { other.load_state_dict(state); }), ErrorCode::mismatch);
  }
  EXPECT_EQ(code_of([] { DistributedSampler(10, 2, 2); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([] { DistributedSampler(10, 0, 0); }), ErrorCode::invalid_argument);
}

// libtorch's loader asks it, and torch::save keeps it.
TEST(DistributedSampler, IsASamplerOfLibtorch) {
  struct Numbers : torch::data::datasets::Dataset<Numbers, std::size_t> {
    std::size_t get(std::size_t index) override { return index; }
    [[nodiscard]] torch::optional<std::size_t> size() const override { return 10; }
  };
  DistributedSampler sampler(10, 2, 1);
  const Samples expected = rest_of(sampler);
  sampler.reset();
  EXPECT_EQ(sampler.next(2)->size(), 2U);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  DistributedSampler again(10, 2, 1);
  again.load(in);
  const auto loader = torch::data::make_data_loader(Numbers(), std::move(again), 2);
  Samples got(expected.begin(), expected.begin() + 2);
  for (const auto& batch : *loader) got.insert(got.end(), batch.begin(), batch.end());
  EXPECT_EQ(got, expected);
}

}  // namespace
}  // namespace tessera
