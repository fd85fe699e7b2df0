#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <optional>

#include "conformance/backend_conformance.h"
#include "conformance/errors.h"
#include "tessera/mesh.h"
#include "torch/same_host_backend.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Values;
using Store = c10::intrusive_ptr<c10d::Store>;

GroupPtr make_by_mesh(const Store& store, int rank, int size, milliseconds deadline,
                      bool same_host) {
  MeshOptions options;
  options.device = torch::kCPU;
  options.deadline = deadline;
  options.same_host = same_host;
  auto group = Mesh(store, rank, size, options).process_group();
  EXPECT_EQ(group->getDefaultBackend()->getBackendName(), same_host ? kSameHostName : "gloo");
  return group;
}

GroupPtr gloo(const Store& store, int rank, int size, milliseconds deadline) {
  return make_by_mesh(store, rank, size, deadline, false);
}
GroupPtr same_host(const Store& store, int rank, int size, milliseconds deadline) {
  return make_by_mesh(store, rank, size, deadline, true);
}

// Shared memory alone, in which everything takes many rounds.
GroupPtr small_ring(const Store& store, int rank, int size, milliseconds deadline) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(
      torch::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
      make_same_host_backend(store, rank, size,
                             {.deadline = deadline, .ring = {.slots = 4, .slot_bytes = 192}}));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

const BackendMaker kGloo{.name = "gloo", .int16 = false, .make = gloo};
const BackendMaker kSameHost{.name = "same_host", .make = same_host};
const BackendMaker kSmallRing{.name = "small_ring", .make = small_ring};

INSTANTIATE_TEST_SUITE_P(, BackendConformance, Values(kGloo, kSameHost, kSmallRing),
                         [](const auto& made) { return made.param.name; });

// The bits that two ranks get, of all types and of sum and average.
std::vector<at::Tensor> two_rank_results(const BackendMaker& maker) {
  std::vector<at::Tensor> results;
  run_groups(maker, 2, [&](c10d::ProcessGroup& group) {
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG}) {
        // Each rank has a generator of its own: the default one is one for all threads.
        auto random = torch::make_generator<at::CPUGeneratorImpl>(group.getRank());
        std::vector<at::Tensor> data{torch::randn({5000}, random).to(type)};
        c10d::AllreduceOptions options;
        options.reduceOp = op;
        group.allreduce(data, options)->wait();
        auto in = torch::randn({2 * 5000}, random).to(type),
             out = torch::empty({5000}, in.options());
        c10d::ReduceScatterOptions scatter;
        scatter.reduceOp = op;
        group.getBackend(torch::kCPU)->_reduce_scatter_base(out, in, scatter)->wait();
        if (group.getRank() == 1) results.insert(results.end(), {data[0], out});
      }
    }
  });
  return results;
}

TEST(SameHost, TwoRanksGetTheBitsOfGloo) {
  const auto theirs = two_rank_results(kGloo);
  const auto ours = two_rank_results(kSameHost);
  ASSERT_EQ(theirs.size(), 16U);
  for (std::size_t i = 0; i < theirs.size(); ++i)
    EXPECT_TRUE(torch::equal(ours[i], theirs[i])) << i << ", " << ours[i].scalar_type();
}

TEST(SameHost, WhatItCannotDoGoesToGloo) {
  run_groups(kSameHost, 2, [](c10d::ProcessGroup& group) {
    c10d::AllreduceOptions product;
    product.reduceOp = c10d::ReduceOp::PRODUCT;
    std::vector<at::Tensor> data{torch::full({3}, group.getRank() + 2.0)};
    group.allreduce(data, product)->wait();
    EXPECT_TRUE(torch::equal(data[0], torch::full({3}, 6.0)));
    if (group.getRank() == 0) {
      group.send(data, 1, 0)->wait();
    } else {
      data[0].zero_();
      group.recv(data, 0, 0)->wait();
      EXPECT_TRUE(torch::equal(data[0], torch::full({3}, 6.0)));
    }
    std::vector<at::Tensor> complex{torch::ones({3}, at::kComplexFloat)};
    group.allreduce(complex)->wait();
    EXPECT_TRUE(torch::equal(complex[0], torch::full({3}, 2, at::kComplexFloat)));
  });
}

TEST(SameHost, WithoutGlooTheRestIsRefused) {
  run_groups(kSmallRing, 2, [](c10d::ProcessGroup& group) {
    std::vector<at::Tensor> data{torch::ones({3})};
    const auto error = error_of([&] { group.send(data, 1 - group.getRank(), 0); });
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_THAT(error.message(), HasSubstr("send"));
    EXPECT_THAT(error.message(), HasSubstr(kSameHostName));
    c10d::AllreduceOptions product;
    product.reduceOp = c10d::ReduceOp::PRODUCT;
    EXPECT_EQ(code_of([&] { group.allreduce(data, product); }), ErrorCode::unsupported);
  });
}

TEST(SameHost, TensorsAreToBePlain) {
  run_groups(kSmallRing, 2, [](c10d::ProcessGroup& group) {
    auto turned = torch::ones({3, 4}).t();
    std::vector<at::Tensor> one{turned}, two{torch::ones({2}), torch::ones({2})};
    auto out = torch::ones({24});
    EXPECT_EQ(code_of([&] { group.allreduce(one); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { compat::all_gather(group, out, turned); }),
              ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { compat::reduce_scatter(group, two[0], out); }),
              ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { group.allreduce(two); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { group.broadcast(two); }), ErrorCode::invalid_argument);
    group.barrier()->wait();
  });
}

TEST(SameHost, WorksThatNobodyAwaitsAreDoneOnTheWay) {
  run_groups(kSmallRing, 3, [](c10d::ProcessGroup& group) {
    for (int i = 0; i < 20; ++i) {
      std::vector<at::Tensor> data{torch::ones({1000})};
      group.allreduce(data);
    }
    std::vector<at::Tensor> data{torch::ones({1000})};
    group.allreduce(data)->wait();
    EXPECT_TRUE(torch::equal(data[0], torch::full({1000}, 3.0)));
  });
}

TEST(SameHost, DifferentCollectivesAreAMismatch) {
  run_groups(kSmallRing, 2, [](c10d::ProcessGroup& group) {
    std::vector<at::Tensor> data{torch::ones({3 + group.getRank()})};
    const auto error = error_of([&] { group.allreduce(data)->wait(); });
    EXPECT_TRUE(error.code() == ErrorCode::mismatch || error.code() == ErrorCode::peer_failed);
    EXPECT_THAT(error.message(), HasSubstr("all_reduce by sum of 3 Float"));
    EXPECT_THAT(error.message(), HasSubstr("all_reduce by sum of 4 Float"));
  });
}

TEST(SameHost, AFailedWorkSaysSoAndTheGroupStaysRefused) {
  run_groups(kSameHost, 2, [](c10d::ProcessGroup& group) {
    if (group.getRank() == 1) return;
    std::vector<at::Tensor> data{torch::ones({4})};
    const auto work = group.allreduce(data);
    const auto start = std::chrono::steady_clock::now();
    while (!work->isCompleted() && std::chrono::steady_clock::now() - start < milliseconds(100)) {
    }
    const auto error = error_of([&] { work->wait(); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_NE(work->exception(), nullptr);
    EXPECT_TRUE(work->getFuture()->hasError());
    EXPECT_EQ(code_of([&] { group.barrier(); }), ErrorCode::peer_failed);
  });
}

TEST(SameHost, AbortEndsAWait) {
  run_groups(kSameHost, 2, [](c10d::ProcessGroup& group) {
    if (group.getRank() == 1) return std::this_thread::sleep_for(std::chrono::seconds(1));
    std::thread killer([&] {
      std::this_thread::sleep_for(milliseconds(100));
      group.getBackend(torch::kCPU)->abort();
    });
    EXPECT_THAT(error_of([&] { group.barrier()->wait(); }).message(), HasSubstr("aborted"));
    killer.join();
  });
}

// The backend that rank 0 of a mesh gets, when each rank wants what `wanted` says.
std::string chosen(const std::vector<bool>& wanted) {
  std::string name;
  const BackendMaker maker{
      .name = "mixed", .make = [&](const Store& store, int rank, int size, milliseconds deadline) {
        MeshOptions options;
        options.device = torch::kCPU;
        options.deadline = deadline;
        options.same_host = wanted[static_cast<std::size_t>(rank)];
        return Mesh(store, rank, size, options).process_group();
      }};
  run_groups(maker, static_cast<int>(wanted.size()), [&](c10d::ProcessGroup& group) {
    if (group.getRank() == 0) name = group.getDefaultBackend()->getBackendName();
    group.barrier()->wait();
  });
  return name;
}

TEST(SameHost, AllRanksChooseTheSame) {
  const char* before = std::getenv("TESSERA_SAME_HOST");
  const std::string kept = before != nullptr ? before : "1";
  unsetenv("TESSERA_SAME_HOST");
  EXPECT_EQ(chosen({true, true, true}), kSameHostName);
  EXPECT_EQ(chosen({true, false, true}), "gloo");
  EXPECT_EQ(chosen({false, false}), "gloo");
  setenv("TESSERA_SAME_HOST", "0", 1);
  EXPECT_EQ(chosen({true, true}), "gloo");
  setenv("TESSERA_SAME_HOST", "no", 1);
  EXPECT_THAT(error_of([] { chosen({true}); }).message(), HasSubstr("TESSERA_SAME_HOST=no"));
  setenv("TESSERA_SAME_HOST", kept.c_str(), 1);
  const char* slot_before = std::getenv("TESSERA_SAME_HOST_SLOT");
  const std::string slot = slot_before != nullptr ? slot_before : "262144";
  for (const char* wrong : {"", "4095", "4097", "64M", "134217728", "-4096"}) {
    setenv("TESSERA_SAME_HOST_SLOT", wrong, 1);
    EXPECT_THAT(error_of([] { chosen({true}); }).message(),
                HasSubstr(std::string("TESSERA_SAME_HOST_SLOT=") + wrong + ","));
  }
  setenv("TESSERA_SAME_HOST_SLOT", slot.c_str(), 1);
}

}  // namespace
}  // namespace tessera
