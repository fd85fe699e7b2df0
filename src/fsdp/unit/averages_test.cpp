// The backend divides sums on the way, as NCCL does: nobody divides them again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/unit_controls.h"
#include "torch/delegating_backend.h"
#include "torch/mesh_state.h"
#include "torch/testing.h"
#include "torch/transport.h"

namespace tessera {
namespace {

using testing::Net;
using testing::run_mesh;
using ReduceOperations = std::vector<c10d::ReduceOp::RedOpType>;

// Says that it is NCCL and averages as NCCL does; a backend of the CPU adds up.
class AveragingBackend final : public DelegatingBackend {
 public:
  AveragingBackend(c10::intrusive_ptr<c10d::Backend> inner, ReduceOperations& seen)
      : DelegatingBackend(inner->getRank(), inner->getSize(), inner), seen_(seen) {}
  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    seen_.push_back(options.reduceOp);
    auto sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    auto work = DelegatingBackend::allreduce(tensors, sum);
    work->wait();
    if (options.reduceOp == c10d::ReduceOp::AVG) tensors[0].div_(getSize());
    return work;
  }

 private:
  ReduceOperations& seen_;
};

// Gradients of one step under `replicate`, and which operations were asked for.
struct AveragedRun {
  std::vector<torch::Tensor> gradients;
  ReduceOperations operations;
};

AveragedRun train_averaged(Mesh& mesh, bool averages, double factor = 0) {
  AveragedRun found;
  auto& state = *detail::state_of(mesh);
  if (averages) {
    using Group = c10d::ProcessGroup;
    auto group = c10::make_intrusive<Group>(state.store, mesh.rank(), mesh.size());
    group->setBackend(torch::kCPU, Group::BackendType::NCCL,
                      c10::make_intrusive<AveragingBackend>(
                          state.process_group->getBackend(torch::kCPU), found.operations));
    group->setDefaultBackend(Group::BackendType::NCCL);
    state.transport = make_c10d_transport(group);
  } else {
    state.transport = make_c10d_transport(state.process_group);
  }
  auto net = testing::make_net({.blocks = 2});
  replicate(net, mesh, {.bucket_bytes = 1000, .first_bucket_bytes = 500});
  if (factor > 0) set_gradient_divide_factor(net, factor);
  testing::loss_of(net, testing::batch_of(0, 0, mesh)).backward();
  for (const auto& parameter : net->parameters()) found.gradients.push_back(parameter.grad());
  return found;
}

void expect_same_gradients(const AveragedRun& found, const AveragedRun& expected) {
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_TRUE(torch::equal(found.gradients[i], expected.gradients[i])) << i;
}

TEST(Averages, OfReplicateAreTheBackendsWhereItHasThem) {
  run_mesh(2, [](Mesh& mesh) {
    const auto expected = train_averaged(mesh, false);
    const auto found = train_averaged(mesh, true);
    EXPECT_GT(found.operations.size(), 1u);
    EXPECT_THAT(found.operations, ::testing::Each(c10d::ReduceOp::AVG));
    expect_same_gradients(found, expected);
  });
}

TEST(Averages, ByAnotherDivisorAreNot) {
  run_mesh(2, [](Mesh& mesh) {
    const auto expected = train_averaged(mesh, false, 3);
    const auto found = train_averaged(mesh, true, 3);
    EXPECT_THAT(found.operations, ::testing::Each(c10d::ReduceOp::SUM));
    expect_same_gradients(found, expected);
  });
}

}  // namespace
}  // namespace tessera
