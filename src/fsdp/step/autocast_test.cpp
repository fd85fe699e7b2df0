// Several passes in one scope of autocast, which keeps what it has cast of a weight: each pass
// casts the weights as they are, with a history of its own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

struct TwiceImpl : nn::Module {
  nn::Linear linear{nullptr};
  TwiceImpl() { linear = register_module("linear", nn::Linear(8, 8)); }
  torch::Tensor forward(const torch::Tensor& x) {
    return linear(torch::tanh(linear(x))).to(torch::kFloat).square().sum();
  }
};
TESSERA_MODULE(Twice);

torch::Tensor input_of_all() {
  return torch::linspace(-1, 1, 24).view({3, 8});
}

// What it gives is compared.
using Passes = std::function<std::vector<double>(Twice& net, torch::optim::SGD& optimizer)>;

double gradient_norm(const torch::optim::SGD& optimizer) {
  double sum = 0;
  for (const auto& parameter : optimizer.param_groups()[0].params())
    if (parameter.grad().defined()) sum += parameter.grad().square().sum().item<double>();
  return sum;
}

std::vector<double> perturbed(Twice& net, torch::optim::SGD& optimizer) {
  const auto x = input_of_all().set_requires_grad(true);
  const auto gradient = torch::autograd::grad({net(x)}, {x})[0];
  const auto loss = net(x + gradient.sign() * 0.1);
  loss.backward();
  return {loss.item<double>(), gradient_norm(optimizer)};
}

std::vector<double> stepped(Twice& net, torch::optim::SGD& optimizer) {
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    const auto loss = net(input_of_all());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

std::vector<double> evaluated_first(Twice& net, torch::optim::SGD& optimizer) {
  {
    const torch::NoGradGuard no_grad;
    static_cast<void>(net(input_of_all()));
  }
  const auto loss = net(input_of_all());
  loss.backward();
  return {loss.item<double>(), gradient_norm(optimizer)};
}

void expect_as_without_kept_casts(const Passes& passes, const char* name) {
  auto alone = with_values(Twice(), 5);
  torch::optim::SGD own(alone->parameters(), 0.01);
  std::vector<double> expected;
  {
    const testing::Autocast scope(/*on=*/true, /*keeps_casts=*/false);
    expected = passes(alone, own);
  }
  using Wrap = std::pair<const char*, std::function<void(Twice&, const Mesh&)>>;
  for (const auto& [kind, wrap] :
       {Wrap("replicate", [](Twice&net, const Mesh&mesh) { replicate(net, mesh); }),
        Wrap("fully_shard", [](Twice&net, const Mesh&mesh) { fully_shard(net, mesh); }),
        Wrap("kept whole",
             [](Twice&net, const Mesh&mesh) {
               fully_shard(net, mesh,
                           {.reshard_after_forward = false, .reshard_after_backward = false});
             }),
        Wrap("FSDP1", [](Twice&net, const Mesh&mesh) {
          const FullyShardedDataParallel<Twice> wrapped(net, mesh, {.use_orig_params = true});
        })}) {
    run_mesh(2, [&, &kind = kind, &wrap = wrap](Mesh& mesh) {
      auto net = with_values(Twice(), 5);
      wrap(net, mesh);
      torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.01);
      const testing::Autocast scope;
      auto found = passes(net, optimizer);
      if (found.size() == 2 && std::string(kind) != "replicate")
        found[1] = mesh.all_reduce_sum(found[1]);
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_NEAR(found[i], expected[i], 5e-3 * expected[i]) << name << ", " << kind << " " << i;
    });
  }
}

TEST(Autocast, KeepsNoCastsFromOnePassToTheNext) {
  expect_as_without_kept_casts(perturbed, "a gradient of the input before");
  expect_as_without_kept_casts(stepped, "steps");
  expect_as_without_kept_casts(evaluated_first, "an evaluation before");
}

}  // namespace
}  // namespace tessera
