// First values of the tests' models. Ranks are threads, and libtorch's default generator is one for
// all of them: whatever another rank draws between a torch::manual_seed and the last draw of a
// model changes that model.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>

namespace tessera::testing {

// Distributed as libtorch's constructors do it, the same for the same `seed`. Parameters of one
// dimension that are no Linear's stay what they are: those of norms.
template <typename Holder>
Holder with_values(Holder holder, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const auto& module : holder->modules()) {
    const bool is_linear = module->template as<torch::nn::Linear>() != nullptr;
    const bool is_table = module->template as<torch::nn::Embedding>() != nullptr;
    double bound = 0;
    for (auto& parameter : module->parameters(/*recurse=*/false)) {
      if (parameter.dim() > 1) bound = 1 / std::sqrt(static_cast<double>(parameter.size(-1)));
      if (is_table) {
        parameter.normal_(0, 1, generator);
      } else if (is_linear || parameter.dim() > 1) {
        parameter.uniform_(-bound, bound, generator);
      }
    }
  }
  return holder;
}

}  // namespace tessera::testing
