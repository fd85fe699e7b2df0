// Conjugates and negatives: torch keeps them as bits beside a tensor's memory, and gradients, whole
// parameters and buffers come with them. However a module is wrapped, values are what they are.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "fsdp/state/sharded_load.h"
#include "fsdp/testing/shardings.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::Sharding;

// A gradient with the bit.
struct Negated : torch::autograd::Function<Negated> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return -x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {at::_neg_view(gradients[0].clone())};
  }
};

torch::Tensor drawn(at::ScalarType type, int seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn({4, 3}, generator, type);
}

// A gradient whose memory is its conjugate, or its negative.
struct BitsImpl : nn::Module {
  torch::Tensor w;
  explicit BitsImpl(at::ScalarType type) { w = register_parameter("w", drawn(type, 1)); }
  torch::Tensor forward(const torch::Tensor& x) {
    return w.is_complex() ? torch::real(w.conj() * x).sum() : (Negated::apply(w) * x).sum();
  }
};
TESSERA_MODULE(Bits);

// The part of `whole` that a rank holds.
torch::Tensor part_of(const torch::Tensor& whole, const ShardedParameter& parameter) {
  const auto count = parameter.local.size(0);
  if (parameter.local.dim() == 1)
    return whole.reshape({-1}).narrow(0, parameter.flat ? parameter.offset : 0, count);
  return whole.narrow(0, parameter.offset, count);
}

// Each rank has the bit, or the first one alone.
void expect_gradients(Sharding kind, at::ScalarType type, bool first_alone,
                      std::optional<at::ScalarType> reduce_dtype = {}) {
  SCOPED_TRACE(testing::name_of(kind) + c10::toString(type) +
               (first_alone ? " on one" : " on all"));
  run_mesh(2, [&](Mesh& mesh) {
    Bits plain(type), module(type);
    testing::shard_as(kind, {.mixed_precision = {.reduce_dtype = reduce_dtype}}, mesh, module);
    if (first_alone && mesh.rank() == 1) {
      module->w.register_hook(
          [](const torch::Tensor& gradient) { return gradient.resolve_conj().resolve_neg(); });
    }
    const auto input = [&](int micro, int rank) { return drawn(type, 10 + 2 * micro + rank); };
    for (int micro = 0; micro < 3; ++micro) {
      for (int rank = 0; rank < 2; ++rank) (plain->forward(input(micro, rank)) / 2).backward();
      std::optional<NoSync> quiet;
      if (micro < 2) quiet.emplace(module);
      module(input(micro, mesh.rank())).backward();
    }
    const auto parameter = sharded_parameters(module)[0];
    const auto expected = part_of(plain->w.grad(), parameter);
    EXPECT_TRUE(testing::allclose(parameter.local.grad().clone(), expected, 1e-9, 1e-9))
        << parameter.local.grad().clone() << expected;
  });
}

TEST(LazyBits, GradientsAreWhatTheyAre) {
  using enum Sharding;
  for (const bool first_alone : {false, true}) {
    for (const auto kind : {rows, replicate, hybrid, original, flat, original_whole})
      expect_gradients(kind, at::kDouble, first_alone);
    // FSDP1 does not take complex parameters, as in PyTorch.
    for (const auto kind : {rows, replicate, hybrid})
      expect_gradients(kind, at::kComplexDouble, first_alone);
  }
}

// The imaginary parts would be lost; PyTorch loses them, with a warning.
TEST(LazyBits, ComplexGradientsAreReducedInTheirOwnType) {
  for (const auto kind : {Sharding::rows, Sharding::hybrid})
    expect_gradients(kind, at::kComplexDouble, false, at::kFloat);
}

struct HeldImpl : nn::Module {
  torch::Tensor w, b;
  HeldImpl(const torch::Tensor& parameter, const torch::Tensor& buffer) {
    w = register_parameter("w", parameter);
    b = register_buffer("b", buffer);
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::real(w * b * x).sum(); }
};
TESSERA_MODULE(Held);

TEST(LazyBits, ParametersAndBuffersAreWhatTheyAre) {
  const auto type = at::kComplexDouble;
  const auto w = drawn(type, 2), b = drawn(type, 3), none = torch::zeros({4, 3}, type);
  const auto expect_held = [&](Held& held) {
    const auto full = full_state_dict(held);
    EXPECT_TRUE(testing::equal(full["w"], w.conj()));
    EXPECT_TRUE(testing::equal(full["b"], b.conj()));
  };
  run_mesh(2, [&](Mesh& mesh) {
    for (const auto kind : {Sharding::rows, Sharding::replicate, Sharding::hybrid}) {
      // On one rank as a bit, on the other in memory.
      const auto conjugate = [&](const torch::Tensor& tensor) {
        const auto copy = tensor.clone().conj();
        return mesh.rank() == 0 ? copy : copy.resolve_conj();
      };
      const auto wrap = [&](Held& held) { testing::shard_as(kind, {}, mesh, held); };
      Held held(conjugate(w), conjugate(b)), empty(none.clone(), none.clone().conj());
      wrap(held);
      wrap(empty);
      expect_held(held);
      const auto state = state_dict(held);
      load_state_dict(empty, state);
      expect_held(empty);
      Held synced(mesh.rank() == 0 ? conjugate(w) : none.clone(),
                  mesh.rank() == 0 ? conjugate(b) : none.clone());
      sync_module_states(synced, mesh);
      wrap(synced);
      expect_held(synced);
    }
    auto sum = at::_neg_view(torch::ones({2}, type));
    if (mesh.rank() == 1) sum = sum.resolve_neg();
    mesh.all_reduce_sum(sum);
    EXPECT_TRUE(testing::equal(sum, torch::full({2}, -2.0, type)));
  });
}

TEST(LazyBits, AnyStateDictHasThem) {
  const auto b = drawn(at::kComplexDouble, 3);
  run_mesh(2, [&](Mesh& mesh) {
    for (const auto type : {StateDictType::full, StateDictType::sharded}) {
      const auto none = torch::zeros({4, 3}, at::kComplexDouble);
      Held held(none.clone(), b.clone().conj()), empty(none.clone(), none.clone());
      for (auto* one : {&held, &empty}) {
        fully_shard(*one, mesh);
        set_state_dict_type(*one, {.type = type});
      }
      load_state_dict(empty, state_dict(held));
      EXPECT_TRUE(testing::equal(empty->b, b.conj()));
      load_state_dict(held, state_dict(empty));
      EXPECT_TRUE(testing::equal(held->b, b.conj()));
    }
  });
}

// The piece that was, and the one in other memory.
TEST(LazyBits, PiecesOfLeavesHaveThem) {
  const auto conjugate = drawn(at::kComplexDouble, 3).conj();
  const auto leaf = detail::chunk_leaf(conjugate, {4, 3}, {{0, 0}, {4, 3}});
  const auto& piece = leaf.pieces.front();
  EXPECT_TRUE(piece.conj);
  EXPECT_TRUE(testing::equal(detail::tensor_of_piece(leaf, piece), conjugate));
  auto moved = leaf;
  moved.pieces.front() = detail::piece_in(piece, detail::tensor_of_piece(leaf, piece).clone());
  EXPECT_TRUE(testing::equal(detail::tensor_of_piece(moved, moved.pieces.front()), conjugate));
}

}  // namespace
}  // namespace tessera
