// What every c10d backend under a Mesh must do: the collectives that the runtime and its users
// call. A backend's test includes this suite and says how a rank's group is made:
//   INSTANTIATE_TEST_SUITE_P(My, BackendConformance, testing::Values(BackendMaker{"my", make}));
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "torch/compat.h"

namespace tessera {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct BackendMaker {
  std::string name;
  // What a backend is not required to do.
  bool int16 = true;
  // Collective.
  std::function<GroupPtr(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         std::chrono::milliseconds deadline)>
      make;
};
inline void PrintTo(const BackendMaker& maker, std::ostream* out) {  // NOLINT: gtest's name
  *out << maker.name;
}

// Threads as ranks, each with its group; the first failure by rank is rethrown.
inline void run_groups(const BackendMaker& maker, int ranks,
                       const std::function<void(c10d::ProcessGroup&)>& body,
                       std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        const auto group = maker.make(store, rank, ranks, deadline);
        body(*group);
      } catch (...) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

// Small whole numbers, exact in every type and in every order of adding.
inline at::Tensor numbers_of(int rank, std::int64_t count, at::ScalarType type) {
  return (torch::arange(count).add(rank * 3).remainder(5)).to(type);
}

class BackendConformance : public testing::TestWithParam<BackendMaker> {
 protected:
  static std::vector<at::ScalarType> types() {
    std::vector<at::ScalarType> types{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                      at::kChar,  at::kInt,    at::kLong, at::kByte};
    if (GetParam().int16) types.push_back(at::kShort);
    return types;
  }
  static constexpr std::int64_t kCounts[] = {0, 1, 13, 5000};

  static void run(int ranks, const std::function<void(c10d::ProcessGroup&)>& body) {
    run_groups(GetParam(), ranks, body);
  }
  static c10d::AllreduceOptions reducing(c10d::ReduceOp::RedOpType op) {
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return options;
  }
  // What a reduction of numbers_of all ranks must give.
  static at::Tensor expected(int ranks, std::int64_t count, at::ScalarType type,
                             c10d::ReduceOp::RedOpType op) {
    auto result = numbers_of(0, count, at::kDouble);
    for (int r = 1; r < ranks; ++r) {
      const auto other = numbers_of(r, count, at::kDouble);
      if (op == c10d::ReduceOp::MIN) {
        result = torch::minimum(result, other);
      } else if (op == c10d::ReduceOp::MAX) {
        result = torch::maximum(result, other);
      } else {
        result = result + other;
      }
    }
    if (op == c10d::ReduceOp::AVG) result = result / ranks;
    return result.to(type);
  }
};

TEST_P(BackendConformance, AllGather) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(ranks, [&](c10d::ProcessGroup& group) {
      for (const auto type : types()) {
        for (const auto count : kCounts) {
          auto in = numbers_of(group.getRank(), count, type);
          auto out = torch::empty({ranks * count}, in.options());
          compat::all_gather(group, out, in)->wait();
          for (int r = 0; r < ranks; ++r)
            ASSERT_TRUE(torch::equal(out.narrow(0, r * count, count), numbers_of(r, count, type)));
        }
      }
      // In place.
      auto out = torch::zeros({ranks * 7});
      auto in = out.narrow(0, group.getRank() * 7, 7);
      in.fill_(group.getRank() + 1);
      compat::all_gather(group, out, in)->wait();
      for (int r = 0; r < ranks; ++r)
        ASSERT_TRUE(torch::equal(out.narrow(0, r * 7, 7), torch::full({7}, r + 1.0)));
    });
  }
}

TEST_P(BackendConformance, AllReduce) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(ranks, [&](c10d::ProcessGroup& group) {
      for (const auto op :
           {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MIN, c10d::ReduceOp::MAX}) {
        for (const auto type : types()) {
          if (op == c10d::ReduceOp::AVG && !at::isFloatingType(type)) continue;
          for (const auto count : kCounts) {
            std::vector<at::Tensor> data{numbers_of(group.getRank(), count, type)};
            group.allreduce(data, reducing(op))->wait();
            const auto right = expected(ranks, count, type, op);
            if (op == c10d::ReduceOp::AVG) {
              ASSERT_TRUE(torch::allclose(data[0], right, 1e-2, 1e-5));
            } else {
              ASSERT_TRUE(torch::equal(data[0], right)) << type << " x " << count;
            }
          }
        }
      }
    });
  }
}

TEST_P(BackendConformance, ReduceScatter) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(ranks, [&](c10d::ProcessGroup& group) {
      for (const auto type : types()) {
        for (const auto count : kCounts) {
          auto in = numbers_of(group.getRank(), ranks * count, type);
          auto out = torch::empty({count}, in.options());
          compat::reduce_scatter(group, out, in)->wait();
          const auto all = expected(ranks, ranks * count, type, c10d::ReduceOp::SUM);
          ASSERT_TRUE(torch::equal(out, all.narrow(0, group.getRank() * count, count)))
              << type << " x " << count << ", rank " << group.getRank() << " of " << ranks;
        }
      }
    });
  }
}

TEST_P(BackendConformance, BoolsAreReducedAsAnyAndAll) {
  run(2, [&](c10d::ProcessGroup& group) {
    const bool second = group.getRank() == 1;
    const auto mine = torch::tensor({0, second ? 1 : 0, second ? 0 : 1, 1}).to(at::kBool);
    std::vector<at::Tensor> any{mine.clone()}, all{mine.clone()};
    group.allreduce(any, reducing(c10d::ReduceOp::MAX))->wait();
    group.allreduce(all, reducing(c10d::ReduceOp::MIN))->wait();
    EXPECT_TRUE(torch::equal(any[0], torch::tensor({0, 1, 1, 1}).to(at::kBool)));
    EXPECT_TRUE(torch::equal(all[0], torch::tensor({0, 0, 0, 1}).to(at::kBool)));
  });
}

TEST_P(BackendConformance, EveryRankGetsTheSameBitsOfASum) {
  run(4, [&](c10d::ProcessGroup& group) {
    std::vector<at::Tensor> data{torch::arange(3001).add(group.getRank()).to(at::kFloat).sin()};
    group.allreduce(data)->wait();
    auto all = torch::empty({4 * 3001});
    compat::all_gather(group, all, data[0])->wait();
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(torch::equal(all.narrow(0, r * 3001, 3001), data[0]));
  });
}

TEST_P(BackendConformance, OneRankToAllAndAllToOne) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(ranks, [&](c10d::ProcessGroup& group) {
      const int rank = group.getRank();
      for (int root = 0; root < ranks; ++root) {
        for (const auto count : kCounts) {
          c10d::BroadcastOptions broadcast;
          broadcast.rootRank = root;
          std::vector<at::Tensor> data{numbers_of(rank, count, at::kInt)};
          group.broadcast(data, broadcast)->wait();
          ASSERT_TRUE(torch::equal(data[0], numbers_of(root, count, at::kInt)));

          c10d::GatherOptions gather;
          gather.rootRank = root;
          std::vector<at::Tensor> mine{numbers_of(rank, count, at::kByte)};
          std::vector<std::vector<at::Tensor>> lists;
          if (rank == root) {
            lists.emplace_back();
            for (int r = 0; r < ranks; ++r) lists[0].push_back(torch::empty_like(mine[0]));
          }
          group.gather(lists, mine, gather)->wait();
          for (int r = 0; rank == root && r < ranks; ++r)
            ASSERT_TRUE(torch::equal(lists[0][r], numbers_of(r, count, at::kByte)));

          c10d::ScatterOptions scatter;
          scatter.rootRank = root;
          for (int r = 0; rank == root && r < ranks; ++r)
            lists[0][r] = numbers_of(r + 7, count, at::kByte);
          group.scatter(mine, lists, scatter)->wait();
          ASSERT_TRUE(torch::equal(mine[0], numbers_of(rank + 7, count, at::kByte)));
        }
      }
      group.barrier()->wait();
    });
  }
}

TEST_P(BackendConformance, ManyAreUnderWayAndAwaitedInAnyOrder) {
  run(3, [&](c10d::ProcessGroup& group) {
    constexpr std::int64_t kCount = 3000;
    std::vector<at::Tensor> ins, outs, contributed, sums;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 12; ++i) {
      ins.push_back(torch::full({kCount}, group.getRank() + i * 10.0));
      outs.push_back(torch::empty({3 * kCount}));
      contributed.push_back(torch::full({3 * kCount}, group.getRank() + i * 1.0));
      sums.push_back(torch::empty({kCount}));
      works.push_back(compat::all_gather(group, outs[i], ins[i]));
      works.push_back(compat::reduce_scatter(group, sums[i], contributed[i]));
    }
    for (std::size_t i = works.size(); i-- > 0;) {
      // Only gathers are asked: Gloo's reductions tell nothing before they are awaited.
      if (i % 10 == 0) {
        while (!works[i]->isCompleted()) std::this_thread::yield();
      }
      if (i % 6 == 0) works[i]->getFuture()->wait();
      EXPECT_TRUE(works[i]->wait());
      EXPECT_TRUE(works[i]->isSuccess());
    }
    for (int i = 0; i < 12; ++i) {
      EXPECT_TRUE(torch::equal(sums[i], torch::full({kCount}, 3.0 + 3 * i)));
      for (int r = 0; r < 3; ++r)
        EXPECT_TRUE(torch::equal(outs[i].narrow(0, r * kCount, kCount),
                                 torch::full({kCount}, r + i * 10.0)));
    }
  });
}

TEST_P(BackendConformance, WrongSizesAreRefusedBeforeAnythingTravels) {
  run(2, [&](c10d::ProcessGroup& group) {
    auto in = torch::ones({4}), out = torch::ones({9}), doubles = torch::ones({8}, at::kDouble);
    EXPECT_ANY_THROW(compat::all_gather(group, out, in));
    EXPECT_ANY_THROW(compat::all_gather(group, doubles, in));
    std::vector<at::Tensor> one{in};
    c10d::BroadcastOptions nobody;
    nobody.rootRank = 2;
    EXPECT_ANY_THROW(group.broadcast(one, nobody));
    group.barrier()->wait();  // the group is whole
  });
}

TEST_P(BackendConformance, AMissingPeerIsAFailureWithinTheDeadline) {
  const auto start = std::chrono::steady_clock::now();
  run_groups(
      GetParam(), 2,
      [](c10d::ProcessGroup& group) {
        if (group.getRank() == 1) return;
        std::vector<at::Tensor> data{torch::ones({4})};
        EXPECT_ANY_THROW(group.allreduce(data)->wait());
      },
      std::chrono::seconds(2));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace tessera
