// Ranks that do not do the same steps: each of them learns at once which rank did what, in which
// unit and step, and what the likely cause is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "fsdp/test_training.h"
#include "tessera/error.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch_of;
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
      reset(net);
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
        EXPECT_NO_THROW(reset(net));
        EXPECT_NO_THROW(reset(net));
        is_done.set_value();
      },
      std::chrono::seconds(2));
}

}  // namespace
}  // namespace tessera
