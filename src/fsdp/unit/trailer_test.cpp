// What travels behind gradients says the same in every type, for any number of ranks and in
// whatever order they add it up (schedule, "Gradients").
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/unit/grad_reducer.h"
#include "tessera/fsdp.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera::detail {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

constexpr std::size_t kParams = 3;
constexpr Reduced kWhat{.id = 0x1234, .pass = 0xFFFF, .trained = 0x0001};

struct Ring {
  int ranks;
  at::ScalarType type;
};

class Rings : public ::testing::TestWithParam<Ring> {
 protected:
  // The trailer of a rank with gradients of the first `count` parameters.
  [[nodiscard]] at::Tensor give(std::size_t count, const Reduced& what) const {
    std::vector<at::Tensor> gradients(kParams);
    for (std::size_t i = 0; i < count; ++i) gradients[i] = torch::ones({1});
    return Trailer::make(gradients, what, torch::dtype(GetParam().type));
  }
  // As a ring adds them up that begins behind rank `begin`: one after the other.
  [[nodiscard]] at::Tensor around(const std::vector<at::Tensor>& given, int begin) const {
    auto sum = given[begin].clone();
    for (std::size_t i = 1; i < given.size(); ++i) sum.add_(given[(begin + i) % given.size()]);
    return sum;
  }
  // As a tree does.
  [[nodiscard]] at::Tensor in_pairs(std::vector<at::Tensor> given) const {
    while (given.size() > 1) {
      std::vector<at::Tensor> sums;
      for (std::size_t i = 0; i + 1 < given.size(); i += 2) sums.push_back(given[i] + given[i + 1]);
      if (given.size() % 2 == 1) sums.push_back(given.back());
      given = std::move(sums);
    }
    return given.front();
  }
  [[nodiscard]] std::vector<at::Tensor> sums_of(const std::vector<at::Tensor>& given) const {
    const int last = GetParam().ranks - 1;
    return {around(given, 0), around(given, last / 3), around(given, last), in_pairs(given)};
  }
};

TEST_P(Rings, OfRanksThatDoTheSame) {
  std::vector<at::Tensor> given(GetParam().ranks, give(1, kWhat));
  given[GetParam().ranks / 2] = give(2, kWhat);
  for (const auto& sum : sums_of(given)) {
    const auto present = Trailer::read(sum, kParams, kWhat);
    EXPECT_EQ(present, (std::vector<bool>{true, true, false}));
  }
}

// It differs by one bit, which the others have or do not have.
TEST_P(Rings, OfWhichOneRankDoesSomethingElse) {
  constexpr Reduced kOthers[] = {
      {.id = kWhat.id ^ 0x0001, .pass = kWhat.pass, .trained = kWhat.trained},
      {.id = kWhat.id ^ 0x1000, .pass = kWhat.pass, .trained = kWhat.trained},
      {.id = kWhat.id, .pass = kWhat.pass ^ 0x8000, .trained = kWhat.trained},
      {.id = kWhat.id, .pass = kWhat.pass, .trained = kWhat.trained ^ 0x0001},
      {.id = kWhat.id, .pass = kWhat.pass, .trained = kWhat.trained ^ 0x8000}};
  constexpr const char* kTexts[] = {"different units", "different units", "different passes",
                                    "different parameters", "different parameters"};
  for (int i = 0; i < 5; ++i) {
    std::vector<at::Tensor> given(GetParam().ranks, give(1, kWhat));
    given[GetParam().ranks / 2] = give(1, kOthers[i]);
    for (const auto& sum : sums_of(given)) {
      for (const auto& mine : {kWhat, kOthers[i]}) {
        EXPECT_THAT(error_of([&] { static_cast<void>(Trailer::read(sum, kParams, mine)); }),
                    HasSubstr(kTexts[i]));
      }
    }
  }
}

std::vector<Ring> rings() {
  std::vector<Ring> all;
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    for (const int ranks : {2, 3, 255, 256, 257, 258, 300, 511, 513, 1000, 2047, 2049, 3333, 4096})
      all.push_back({ranks, type});
  }
  return all;
}

std::string ring_name(const ::testing::TestParamInfo<Ring>& ring) {
  return c10::toString(ring.param.type) + std::to_string(ring.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(All, Rings, ::testing::ValuesIn(rings()), ring_name);

// Sums that wait for the other copies are added up too, one for each backward.
TEST(Trailer, CountsNoBackwards_F25) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    tessera::testing::run_mesh(4, [&](Mesh& mesh) {
      torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
      fully_shard(linear, mesh.split(2), {.mixed_precision = {.reduce_dtype = type}});
      for (int pass = 0; pass < 300; ++pass) {
        set_requires_all_reduce(linear, pass == 299);
        // Becomes 1 of each rank and pass.
        (tessera::call_module(linear, torch::ones({1, 4})).sum() / 300).backward();
      }
      const auto gradient = sharded_parameters(linear)[0].local.grad();
      ASSERT_TRUE(gradient.defined());
      // As exact as 300 additions in the type are.
      const double error = type == at::kFloat ? 1e-5 : type == at::kHalf ? 0.1 : 0.5;
      EXPECT_TRUE(testing::allclose(gradient, torch::ones_like(gradient), error)) << type;
    });
  }
}

}  // namespace
}  // namespace tessera::detail
