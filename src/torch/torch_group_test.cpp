#include "torch/torch_group.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/long_work.h"
#include "comm/message.h"
#include "tessera/mesh.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using testing::run_mesh;

Bytes both(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// Ranks without a mesh, which would connect all with all.
void run_groups(int count, const std::function<void(Group&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto said = testing::error_of([&] {
        body(*make_tree_group(rank, count, {}, 60s, connect_by_gloo(store, rank, count, 60s)));
      });
      EXPECT_EQ(said, "no Error") << rank;
    });
  }
}

TEST(CheckpointGroup, FoldsInRankOrderAndSpreads) {
  for (const int count : {1, 2, 3, 33, 34, 64}) {
    std::string expected;
    for (int rank = 0; rank < count; ++rank) expected += std::to_string(rank) + " ";
    run_groups(count, [&](Group& group) {
      const Bytes all = group.fold(to_bytes(std::to_string(group.rank()) + " "), both);
      EXPECT_EQ(to_text(all), group.rank() == 0 ? expected : "");
      EXPECT_EQ(to_text(group.spread(group.rank() == 0 ? all : Bytes())), expected);
    });
  }
}

// Signs of life go to a peer until it has ended: without a mesh, SIGPIPE could end this process.
TEST(CheckpointGroup, WithoutAMeshSurvivesBrokenPipes) {
  const auto handler = [] {
    struct sigaction now {};
    ::sigaction(SIGPIPE, nullptr, &now);
    return now.sa_handler;
  };
  const auto before = ::signal(SIGPIPE, SIG_DFL);
  run_groups(1, [](Group&) {});
  EXPECT_EQ(handler(), SIG_DFL);
  run_groups(2, [](Group& group) { group.barrier(); });
  EXPECT_EQ(handler(), SIG_IGN);
  ::signal(SIGPIPE, before);
}

TEST(CheckpointGroup, IsMadeOnceByAMesh) {
  for (const int world : {1, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      Group& group = mesh.checkpoint_group();
      EXPECT_EQ(&group, &mesh.checkpoint_group());
      EXPECT_EQ(group.size(), world);
      EXPECT_EQ(group.all_gather({}).size(), static_cast<std::size_t>(world));
    });
  }
}

TEST(CheckpointGroup, CarriesLargeMessages) {
  constexpr std::size_t kSize = (std::size_t{64} << 20) + 5;
  run_mesh(2, [](Mesh& mesh) {
    Group& group = mesh.checkpoint_group();
    Bytes mine(group.rank() == 1 ? kSize : 3, static_cast<std::byte>(group.rank() + 1));
    const Bytes spread = group.spread(group.fold(std::move(mine), both));
    ASSERT_EQ(spread.size(), kSize + 3);
    EXPECT_EQ(spread[2], std::byte{1});
    EXPECT_TRUE(std::all_of(spread.begin() + 3, spread.end(),
                            [](std::byte byte) { return byte == std::byte{2}; }));
  });
}

TEST(CheckpointGroup, OfAMeshThatWasSplitOffIsItsOwn) {
  run_mesh(4, [](Mesh& mesh) {
    const HybridMesh hybrid = mesh.split(2);
    EXPECT_EQ(hybrid.shard.checkpoint_group().size(), 2);
    const auto mine = to_bytes(std::to_string(mesh.rank()));
    const int first = mesh.rank() / 2 * 2;
    const std::vector<Bytes> pair{to_bytes(std::to_string(first)),
                                  to_bytes(std::to_string(first + 1))};
    EXPECT_EQ(hybrid.shard.checkpoint_group().all_gather(mine), pair);
    EXPECT_EQ(mesh.checkpoint_group().all_gather(mine).size(), 4U);
  });
}

TEST(CheckpointGroup, OneThreadMayUseItWhileAnotherTrains) {
  run_mesh(3, [](Mesh& mesh) {
    Group& group = mesh.checkpoint_group();
    std::thread saving([&] {
      for (int i = 0; i < 20; ++i) agree(group, "saving", [] {});
    });
    for (int i = 0; i < 20; ++i) EXPECT_EQ(mesh.all_reduce_sum(1.0), 3.0);
    saving.join();
  });
}

TEST(CheckpointGroup, AFailureEndsTheLongWorkOfAll) {
  std::atomic<int> failed = 0;
  run_mesh(3, [&](Mesh& mesh) {
    Group& group = mesh.checkpoint_group();
    for (int round = 0; round < 3; ++round) {
      try {
        agree_on_long_work(group, "working", {}, [&](const std::stop_token& stop) {
          if (group.rank() == round) throw Error(ErrorCode::out_of_space, "full");
          while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
          throw Error(ErrorCode::cancelled, "asked to stop");
        });
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::out_of_space) << error.what();
        ++failed;
      }
    }
  });
  EXPECT_EQ(failed, 9);
}

TEST(CheckpointGroup, WhoNeverAsksForItIsNamed) {
  std::atomic<int> named = 0;
  run_mesh(
      3,
      [&](Mesh& mesh) {
        if (mesh.rank() == 1) return;
        try {
          (void)mesh.checkpoint_group();
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
          EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1 has not come"));
          ++named;
        }
      },
      3s);
  EXPECT_EQ(named, 2);
}

}  // namespace
}  // namespace tessera
