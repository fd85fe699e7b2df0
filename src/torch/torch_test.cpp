#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tessera/error.h"
#include "tessera/mesh.h"
#include "torch/delegating_backend.h"
#include "torch/tensor.h"
#include "torch/testing.h"
#include "torch/torch_group.h"

namespace tessera {
namespace {

using testing::run_mesh;

Bytes text(const std::string& s) {
  const auto* begin = reinterpret_cast<const std::byte*>(s.data());
  return Bytes(begin, begin + s.size());
}

TEST(TorchGroup, CarriesMessagesOfAnyLength) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      auto& group = mesh.group();
      const int rank = group.rank();
      const auto mine =
          text(std::string(rank * 1000, static_cast<char>('a' + rank)));  // rank 0: empty
      const auto all = group.all_gather(mine);
      ASSERT_EQ(all.size(), static_cast<std::size_t>(world));
      for (int r = 0; r < world; ++r) EXPECT_EQ(all[r].size(), r * 1000u);
      EXPECT_EQ(all[rank], mine);
      const auto gathered = group.gather(mine, world - 1);
      EXPECT_EQ(gathered.size(), rank == world - 1 ? world : 0u);
      EXPECT_EQ(group.broadcast(rank == 0 ? text("hello") : Bytes(), 0), text("hello"));
      std::vector<Bytes> parts;
      for (int r = 0; rank == 0 && r < world; ++r) parts.push_back(text(std::string(r, 'x')));
      EXPECT_EQ(group.scatter(parts, 0), text(std::string(rank, 'x')));
      group.barrier();
    });
  }
}

// A rank of a soak ended without a word, by writing to a peer that had left.
TEST(Mesh, OfSeveralRanksSurvivesBrokenPipesButLeavesAHandler) {
  const auto handler = [] {
    struct sigaction now {};
    ::sigaction(SIGPIPE, nullptr, &now);
    return now.sa_handler;
  };
  const auto before = ::signal(SIGPIPE, SIG_DFL);
  run_mesh(1, [](Mesh&) {});
  EXPECT_EQ(handler(), SIG_DFL);
  run_mesh(2, [](Mesh&) {});
  EXPECT_EQ(handler(), SIG_IGN);
  const auto own = [](int) {};
  ::signal(SIGPIPE, own);
  run_mesh(2, [](Mesh&) {});
  EXPECT_EQ(handler(), static_cast<void (*)(int)>(own));
  ::signal(SIGPIPE, before);
}

TEST(TorchGroup, LostPeerIsAnErrorWithinTheDeadlineAndBreaksTheGroup) {
  const auto start = std::chrono::steady_clock::now();
  run_mesh(
      2,
      [](Mesh& mesh) {
        if (mesh.rank() == 1) return;  // leaves
        for (int i = 0; i < 2; ++i) {
          try {
            mesh.group().all_gather(text("x"));
            ADD_FAILURE() << "answered by nobody";
          } catch (const Error& e) {
            EXPECT_TRUE(e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer_failed)
                << e.what();
          }
        }
      },
      std::chrono::seconds(3));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Fails without words, as backends of others may.
class Wordless final : public DelegatingBackend {
 public:
  Wordless() : DelegatingBackend(/*rank=*/0, /*size=*/2, {}) {}
  const std::string getBackendName() const override { return "wordless"; }
  WorkPtr _allgather_base(at::Tensor& /*out*/, at::Tensor& /*in*/,
                          const c10d::AllgatherOptions& /*options*/) override {
    ++calls;
    if (has_type) throw std::runtime_error("");
    throw 0;  // NOLINT(*-exception-baseclass)
  }
  bool has_type = false;  // of the standard library
  int calls = 0;
};

// Ranks no longer agree on what comes next, whatever the failure says.
TEST(TorchGroup, AFailureWithoutWordsBreaksItToo) {
  for (const bool has_type : {true, false}) {
    const auto backend = c10::make_intrusive<Wordless>();
    backend->has_type = has_type;
    const auto made = c10::make_intrusive<c10d::ProcessGroup>(
        c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*size=*/2);
    made->setBackend(torch::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    made->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    const auto group = make_torch_group(made, {});
    EXPECT_ANY_THROW(group->barrier());
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(testing::error_of([&] { group->barrier(); }),
                  ::testing::HasSubstr("broken by an earlier failure"));
    }
    EXPECT_EQ(backend->calls, 1) << has_type;
  }
}

TEST(Mesh, AddsUpOverRanks) {
  run_mesh(3, [](Mesh& mesh) { EXPECT_EQ(mesh.all_reduce_sum(mesh.rank() + 1.0), 6.0); });
}

// 47, 2.1, of a program's own store: what a mesh before has left there is not for the next one.
TEST(Mesh, IsMadeAgainThroughOneStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make_some = [&](int rank) {
    MeshOptions options;
    options.device = torch::kCPU;
    options.deadline = std::chrono::seconds(20);
    for (int i = 0; i < 10; ++i) {
      options.same_host = i % 2 == 0;
      const Mesh mesh(store, rank, 2, options);
      EXPECT_EQ(mesh.all_reduce_sum(rank + 1.0), 3.0);
    }
  };
  std::thread other([&] { make_some(1); });
  make_some(0);
  other.join();
}

// A rank that gives up leaves its address in the store; the next attempt of the others does not
// take it for one of somebody who is there.
TEST(Mesh, IsMadeAfterAttemptsOfOneRankAlone) {
  for (const int hasty : {0, 1}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto make = [&](int rank, std::chrono::milliseconds deadline) {
      MeshOptions options;
      options.device = torch::kCPU;
      options.deadline = deadline;
      return Mesh(store, rank, 2, options).all_reduce_sum(rank + 1.0);
    };
    for (int i = 0; i < 2; ++i) {
      try {
        make(hasty, std::chrono::milliseconds(100));
        ADD_FAILURE() << "nobody else is there";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
        EXPECT_THAT(error.what(),
                    ::testing::HasSubstr("waiting for rank " + std::to_string(1 - hasty)));
      }
    }
    std::thread other([&] { EXPECT_EQ(make(1 - hasty, std::chrono::seconds(20)), 3.0); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it is there before
    EXPECT_EQ(make(hasty, std::chrono::seconds(20)), 3.0);
    other.join();
  }
}

// One that gives up while a third is waited for is met by its next attempt.
TEST(Mesh, IsMadeOfWhoIsThereWhenTheLastOneComes) {
  using std::chrono::milliseconds;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](int rank, milliseconds deadline) {
    MeshOptions options;
    options.device = torch::kCPU;
    options.deadline = deadline;
    return Mesh(store, rank, 3, options).all_reduce_sum(rank + 1.0);
  };
  std::thread first([&] { EXPECT_EQ(make(0, std::chrono::seconds(20)), 6.0); });
  std::thread hasty([&] {
    EXPECT_THAT(testing::error_of([&] { make(1, milliseconds(300)); }),
                ::testing::HasSubstr("waiting for rank 0"));
    EXPECT_EQ(make(1, std::chrono::seconds(20)), 6.0);
  });
  std::this_thread::sleep_for(milliseconds(1500));
  EXPECT_EQ(make(2, std::chrono::seconds(20)), 6.0);
  first.join();
  hasty.join();
}

// 51, 2: a group that the program has made carries the mesh, and the program goes on using it.
TEST(Mesh, IsMadeOfAProcessGroupOfTheProgram) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group_of = [&](int rank, bool has_default) {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(20));
    options->devices.push_back(make_gloo_device());
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2);
    group->setBackend(
        torch::kCPU, c10d::ProcessGroup::BackendType::GLOO,
        c10::make_intrusive<c10d::ProcessGroupGloo>(
            c10::make_intrusive<c10d::PrefixStore>(has_default ? "default" : "none", store), rank,
            2, options));
    if (has_default) group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    return group;
  };
  const auto use = [&](int rank) {
    for (const bool has_default : {true, false}) {
      const auto group = group_of(rank, has_default);
      MeshOptions options;
      options.device = torch::kCPU;
      options.deadline = std::chrono::seconds(20);
      for (int i = 0; i < 3; ++i) {
        const Mesh mesh(group, options);
        EXPECT_EQ(mesh.rank(), rank);
        EXPECT_EQ(mesh.all_reduce_sum(rank + 1.0), 3.0);
        EXPECT_EQ(mesh.process_group() == group, has_default);
        EXPECT_EQ(mesh.checkpoint_group().all_gather(Bytes(1)).size(), 2u);
        EXPECT_EQ(mesh.split(2).shard.all_reduce_sum(1.0), 2.0);
        std::vector<at::Tensor> own{torch::ones({3})};
        if (has_default) {
          group->allreduce(own)->wait();
          EXPECT_EQ(own[0][0].item<float>(), 2);
        }
      }
    }
  };
  std::thread other([&] { use(1); });
  use(0);
  other.join();
}

TEST(Mesh, RefusesAProcessGroupThatCannotCarryIt) {
  using Group = c10d::ProcessGroup;
  const auto refusal = [](const c10::intrusive_ptr<Group>& group) {
    MeshOptions options;
    options.device = torch::kCPU;
    return testing::error_of([&] { Mesh mesh(group, options); });
  };
  EXPECT_THAT(refusal({}), ::testing::HasSubstr("a mesh of no process group"));
  EXPECT_THAT(refusal(c10::make_intrusive<Group>(0, 1)), ::testing::HasSubstr("has no store"));
  EXPECT_THAT(refusal(c10::make_intrusive<Group>(c10::make_intrusive<c10d::HashStore>(), 0, 1)),
              ::testing::HasSubstr("no backend for devices of type cpu"));
}

TEST(Mesh, SaysWhichVariableIsWrong) {
  unsetenv("WORLD_SIZE");
  unsetenv("RANK");
  EXPECT_EQ(Mesh::from_environment().size(), 1);
  setenv("RANK", "0", 1);
  const auto message = [] {
    try {
      static_cast<void>(Mesh::from_environment());
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(message(), ::testing::HasSubstr("WORLD_SIZE"));
  setenv("WORLD_SIZE", "two", 1);
  EXPECT_THAT(message(), ::testing::HasSubstr("WORLD_SIZE=two"));
  unsetenv("WORLD_SIZE");
  unsetenv("RANK");
}

TEST(Mesh, SaysThatThePortIsTaken) {
  c10d::TCPStoreOptions options;
  options.port = 0;  // the system's choice
  options.isServer = true;
  options.waitWorkers = false;
  const auto taken = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(taken->getPort()).c_str(), 1);
  try {
    static_cast<void>(Mesh::from_environment());
    ADD_FAILURE() << "two ranks on one port";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::io);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("address already in use"));
  }
  for (const auto* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
}

// Exit code 1 when a root is not the one that the next call gives.
[[noreturn]] void compute_on_threads_at_once() {
  torch::mm(torch::ones({8, 5}), torch::ones({5, 3}));  // MKL's own beginning has a lock
  constexpr int kThreads = 3;
  std::atomic<int> arrived = 0;
  std::atomic<bool> same = true;
  const auto compute = [&] {
    MeshOptions options;
    options.device = torch::kCPU;
    const Mesh mesh(options);
    const auto x = torch::arange(1, 60).to(at::kFloat) * 0.037;
    ++arrived;
    while (arrived < kThreads) continue;  // threads that sleep would wake one by one
    const auto first = x.sqrt();
    if (!torch::equal(first, x.sqrt())) same = false;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(compute);
  for (auto& thread : threads) thread.join();
  std::_Exit(same ? 0 : 1);
}

// Without settle_vector_math about one process in seven fails.
TEST(MeshDeathTest, ThreadsMayBeginToComputeAtOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // each in a process of its own
  for (int run = 0; run < 30; ++run) {
    EXPECT_EXIT(compute_on_threads_at_once(), ::testing::ExitedWithCode(0), "");
  }
}

TEST(Tensors, LeavesShareMemoryBothWays) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kComplexFloat}) {
    auto tensor = torch::ones({3, 4}).to(type).t().narrow(0, 1, 2);
    const auto leaf = leaf_of(tensor);
    EXPECT_EQ(scalar_type_of(leaf.dtype), type);
    auto back = tensor_of(leaf);
    EXPECT_TRUE(torch::equal(back, tensor));
    tensor.zero_();
    EXPECT_TRUE(torch::equal(back, tensor));
  }
}

}  // namespace
}  // namespace tessera
