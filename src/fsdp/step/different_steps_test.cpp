// Ranks that do not do the same steps: each of them learns at once which rank did what, in which
// unit and step, and what the likely cause is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_training.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

// What each rank throws in `body`, which gets a sharded model after its first step. Nobody waits
// until the deadline: who found out tells the others.
std::vector<std::string> texts(int ranks, const std::function<void(Mesh&, Net&)>& body) {
  std::vector<std::string> found(ranks);
  run_mesh(ranks, [&](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    loss_of(net, batch_of(0, 0, mesh)).backward();
    try {
      body(mesh, net);
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ErrorCode::timeout) << error.what();
      found[mesh.rank()] = error.what();
    }
  });
  return found;
}

TEST(DifferentSteps, OneRankGoesOnWithoutItsBackward) {
  const auto found = texts(3, [](Mesh& mesh, Net& net) {
    auto loss = loss_of(net, batch_of(1, 0, mesh));
    // `if (isnan(loss)) continue;` with the rank's own loss
    if (mesh.rank() != 1) loss.backward();
    loss_of(net, batch_of(2, 0, mesh)).backward();
  });
  for (const auto& text : found) {
    EXPECT_THAT(text, HasSubstr("rank 1"));
    EXPECT_THAT(text, HasSubstr("unit 2 'block2' (the backward of step 2"));
    EXPECT_THAT(text, HasSubstr("the forward of step 3, at "));
    EXPECT_THAT(text, HasSubstr("`continue` where the loss is NaN"));
  }
}

TEST(DifferentSteps, OneRankLeavesOutAForward) {
  const auto found = texts(2, [](Mesh& mesh, Net& net) {
    if (mesh.rank() == 0) static_cast<void>(loss_of(net, batch_of(1, 0, mesh)));
    clip_grad_norm(sharded_parameters(net), 1.0);
  });
  for (const auto& text : found) {
    EXPECT_THAT(text, HasSubstr("the forward of step 2, at the root"));
    EXPECT_THAT(text, HasSubstr("after the backward of step 1"));
    EXPECT_THAT(text, HasSubstr("look for a step that one rank leaves out"));
  }
}

TEST(DifferentSteps, OneRankHasNoTokensForAnExpert) {
  const auto found = texts(2, [](Mesh& mesh, Net& net) {
    const auto x = torch::ones({2, kWidth});
    const torch::NoGradGuard no_grad;
    for (int expert = mesh.rank(); expert < 3; ++expert) net->blocks[expert](x);
  });
  for (const auto& text : found) {
    EXPECT_THAT(text, HasSubstr("at 'block0'"));
    EXPECT_THAT(text, HasSubstr("at 'block1'"));
    EXPECT_THAT(text, HasSubstr("an expert without tokens"));
  }
}

// What only one rank throws the others learn from its next collective.
TEST(DifferentSteps, OneRankThrowsAloneAndResets) {
  const auto found = texts(2, [](Mesh& mesh, Net& net) {
    if (mesh.rank() == 0) {
      const auto wrong = torch::full({1, 5}, testing::kVocabulary + 7, torch::kInt64);
      EXPECT_THROW(static_cast<void>(net(wrong)), c10::Error);
      abandon_step(net);
    }
    loss_of(net, batch_of(1, 0, mesh)).backward();
  });
  for (const auto& text : found) EXPECT_THAT(text, HasSubstr("of step 3, at the root"));
}

// A transport that has failed once has nothing left to wait for.
TEST(DifferentSteps, ResetAfterATimeoutMayBeCalledAgain) {
  std::promise<void> is_done;
  auto done = is_done.get_future().share();
  run_mesh(
      2,
      [&](Mesh& mesh) {
        auto net = make_net({});
        testing::shard(net, mesh);
        loss_of(net, batch_of(0, 0, mesh)).backward();
        if (mesh.rank() == 1) return done.wait();
        EXPECT_THROW(static_cast<void>(loss_of(net, batch_of(1, 0, mesh))), Error);
        EXPECT_NO_THROW(abandon_step(net));
        EXPECT_NO_THROW(abandon_step(net));
        is_done.set_value();
      },
      std::chrono::seconds(2));
}

// What its messages are for travels with them: nobody takes them for names of units.
TEST(DifferentSteps, OneRankSavesAloneInTheFirstPassOfTheOthers) {
  std::vector<std::string> found(2);
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    found[mesh.rank()] = error_of([&] {
      const auto path = ::testing::TempDir() + "tessera_saves_alone";
      if (mesh.rank() == 0) save(model_state(net), path, mesh.group());
      loss_of(net, batch_of(0, 0, mesh)).backward();
    });
  });
  for (const auto& text : found) {
    EXPECT_THAT(text, HasSubstr("an agreement in saving a checkpoint"));
    EXPECT_THAT(text, HasSubstr("comparing units in the first training pass"));
    EXPECT_THAT(text, HasSubstr("the forward of step 1, at the root"));
  }
}

TEST(DifferentSteps, ABarrierIsNoMessage) {
  std::vector<std::string> found(3);
  run_mesh(3, [&](Mesh& mesh) {
    found[mesh.rank()] = error_of([&] {
      if (mesh.rank() == 1) return mesh.group().barrier();
      static_cast<void>(mesh.group().all_gather({}));
    });
  });
  for (const auto& text : found) {
    EXPECT_THAT(text, HasSubstr("for a barrier"));
    EXPECT_THAT(text, HasSubstr("for a message to all ranks"));
  }
}

TEST(DifferentSteps, OneRankBuiltAWiderModule) {
  std::string found;
  run_mesh(2, [&](Mesh& mesh) {
    torch::nn::Linear linear(3, 4 + mesh.rank());
    const auto text = error_of([&] {
      sync_module_states(linear, mesh);
      mesh.group().barrier();
    });
    if (mesh.rank() == 1) found = text;
  });
  EXPECT_THAT(found, HasSubstr("mismatch: "));
  EXPECT_THAT(found, HasSubstr("broadcast "));
}

// Every rank has all parameters: nothing but the gradients meets.
class DifferentStepsOfCopies : public ::testing::TestWithParam<const char*> {
 protected:
  static void shard(Net& net, const Mesh& mesh) {
    if (std::string(GetParam()) == "copies") return fully_shard(net, mesh.split(1));
    if (std::string(GetParam()) == "blocks") {
      for (auto& block : net->blocks) replicate(block, mesh);
    }
    replicate(net, mesh);
  }
  // What each rank throws in `body`.
  static std::vector<std::string> texts(const std::function<void(Mesh&, Net&)>& body) {
    std::vector<std::string> found(3);
    run_mesh(3, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, mesh);
      loss_of(net, batch_of(0, 0, mesh)).backward();
      found[mesh.rank()] = error_of([&] { body(mesh, net); });
    });
    return found;
  }
};

TEST_P(DifferentStepsOfCopies, OneRankGoesOnWithoutItsBackward) {
  const auto found = texts([](Mesh& mesh, Net& net) {
    auto loss = loss_of(net, batch_of(1, 0, mesh));
    if (mesh.rank() != 1) loss.backward();
    loss_of(net, batch_of(2, 0, mesh)).backward();
  });
  for (const auto& text : found) EXPECT_THAT(text, HasSubstr("`continue` where the loss is NaN"));
  if (std::string(GetParam()) == "replicate") {
    EXPECT_THAT(found[0], HasSubstr("this rank is at the end of the backward of step 2"));
    EXPECT_THAT(found[1], HasSubstr("this rank is at the end of the backward of step 3"));
  }
}

// It has made as many forwards as the others when its gradients meet theirs.
TEST_P(DifferentStepsOfCopies, OneRankLeavesOutABackwardAmongSeveral) {
  const auto found = texts([](Mesh& mesh, Net& net) {
    const auto accumulate = [&](int step, int count) {
      const NoSync no_sync(net);
      for (int micro = 0; micro < count; ++micro)
        loss_of(net, batch_of(step, micro, mesh)).backward();
    };
    if (mesh.rank() == 1) static_cast<void>(loss_of(net, batch_of(1, 0, mesh)));
    accumulate(1, mesh.rank() == 1 ? 1 : 2);
    loss_of(net, batch_of(1, 2, mesh)).backward();
  });
  for (const auto& text : found) EXPECT_THAT(text, HasSubstr("mismatch: "));
}

TEST_P(DifferentStepsOfCopies, OneRankSynchronisesNothingInAStep) {
  const auto found = texts([](Mesh& mesh, Net& net) {
    {
      std::optional<NoSync> no_sync;
      if (mesh.rank() == 2) no_sync.emplace(net);
      loss_of(net, batch_of(1, 0, mesh)).backward();
    }
    loss_of(net, batch_of(2, 0, mesh)).backward();
  });
  for (const auto& text : found) EXPECT_THAT(text, HasSubstr("of different passes"));
}

TEST_P(DifferentStepsOfCopies, OneRankResetsAlone) {
  if (std::string(GetParam()) == "copies") GTEST_SKIP() << "compares units in its next pass alone";
  const auto found = texts([](Mesh& mesh, Net& net) {
    if (mesh.rank() == 0) abandon_step(net);
    loss_of(net, batch_of(1, 0, mesh)).backward();
  });
  for (const auto& text : found) EXPECT_THAT(text, HasSubstr("called abandon_step alone"));
}

// Nothing is gathered, so one rank may evaluate or fail alone, as long as all train together.
TEST_P(DifferentStepsOfCopies, WhatIsNoStepMayDiffer) {
  if (std::string(GetParam()) == "copies") GTEST_SKIP() << "compares the units of passes";
  const auto found = texts([](Mesh& mesh, Net& net) {
    if (mesh.rank() == 1) {
      net->eval();
      if (std::string(GetParam()) == "replicate")
        static_cast<void>(loss_of(net, batch_of(1, 0, mesh)));
      net->train();
      const torch::NoGradGuard no_grad;
      static_cast<void>(loss_of(net, batch_of(1, 0, mesh)));
    }
    loss_of(net, batch_of(1, 0, mesh)).backward();
    const auto wrong = torch::full({1, 5}, testing::kVocabulary + 7, torch::kInt64);
    if (mesh.rank() == 2) {
      EXPECT_THROW(static_cast<void>(net(wrong)), c10::Error);
    }
    abandon_step(net);
    for (int step = 2; step < 4; ++step) loss_of(net, batch_of(step, 0, mesh)).backward();
  });
  for (const auto& text : found) EXPECT_EQ(text, "no Error");
}

INSTANTIATE_TEST_SUITE_P(All, DifferentStepsOfCopies,
                         ::testing::Values("replicate", "blocks", "copies"),
                         [](const auto& one) { return std::string(one.param); });

// Its connections close, or its deadline ends: what it did not come to says unit, step and rank.
TEST(DifferentSteps, OneRankLeaves) {
  for (const bool replicated : {false, true}) {
    std::string found;
    run_mesh(2, [&](Mesh& mesh) {
      auto net = make_net({});
      if (replicated) {
        replicate(net, mesh);
      } else {
        testing::shard(net, mesh);
      }
      loss_of(net, batch_of(0, 0, mesh)).backward();
      if (mesh.rank() == 1) return;
      found = error_of([&] { loss_of(net, batch_of(1, 0, mesh)).backward(); });
    });
    EXPECT_THAT(found, HasSubstr("rank 1"));
    EXPECT_THAT(found, HasSubstr("of step 2, at "));
    EXPECT_THAT(found, HasSubstr(replicated ? "sum of" : "gather of"));
  }
}

TEST(DifferentSteps, OneRankDoesNotCome) {
  std::promise<void> is_done;
  auto done = is_done.get_future().share();
  std::string found;
  run_mesh(
      2,
      [&](Mesh& mesh) {
        auto net = make_net({});
        replicate(net, mesh);
        loss_of(net, batch_of(0, 0, mesh)).backward();
        if (mesh.rank() == 1) return done.wait();
        found = error_of([&] { loss_of(net, batch_of(1, 0, mesh)).backward(); });
        is_done.set_value();
      },
      std::chrono::seconds(1));
  EXPECT_THAT(found, HasSubstr("timeout: "));
  EXPECT_THAT(found, HasSubstr("rank 1 did not come to "));
  EXPECT_THAT(found, HasSubstr("backward of step 2, at the root"));
}

}  // namespace
}  // namespace tessera
