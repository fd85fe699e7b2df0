// Random number generators go on as Python's torch would.
#include "tessera/checkpointer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>

#include "conformance/errors.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

// tests/golden/make/random_states.py
Value golden() {
  return Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/random_states.pt").load();
}

at::Tensor tensor_at(const Value& dict, const char* key) {
  return tensor_of(dict.at(key).as_tensor());
}

Value torch_alone(const Value& state) {
  return Value::dict({{"torch", state}});
}

void expect_draws(const Value& expected) {
  EXPECT_TRUE(torch::equal(torch::rand(5), tensor_at(expected, "uniform")));
  EXPECT_TRUE(torch::equal(torch::randn(3, torch::kFloat64), tensor_at(expected, "normal")));
  EXPECT_TRUE(torch::equal(torch::randperm(7), tensor_at(expected, "order")));
}

TEST(RandomState, HasTheBytesOfPythons) {
  const Value fresh = golden().at("fresh");
  torch::manual_seed(fresh.at("seed").as_int());
  EXPECT_EQ(tensor_at(random_state(), "torch").numel(), 5056);
  EXPECT_TRUE(torch::equal(tensor_at(random_state(), "torch"), tensor_at(fresh, "state")));
}

// Bit for bit what Python draws, and the state that it is in afterwards.
TEST(RandomState, GoesOnAsPythonDoes) {
  const Value cases = golden();
  for (const auto& [name, one] : cases.pairs()) {
    SCOPED_TRACE(name.as_string());
    torch::manual_seed(1);
    set_random_state(torch_alone(one.at("state")));
    expect_draws(one.at("draws"));
    EXPECT_TRUE(torch::equal(tensor_at(random_state(), "torch"), tensor_at(one, "after")));
  }
}

TEST(RandomState, PassesOthersStatesThrough) {
  const auto python = Value::tuple({3, Value::tuple({1, 2, 3}), Value()});
  const auto before = Value::dict({{"python", python}, {"torch", 1}, {"numpy", "MT19937"}});
  const auto state = random_state(before);
  EXPECT_EQ(state.size(), 4U);
  EXPECT_TRUE(state.at("python") == python);
  EXPECT_EQ(state.at("numpy").as_string(), "MT19937");
  EXPECT_TRUE(state.at("torch").is(Value::Kind::tensor));
  EXPECT_EQ(tensor_at(state, "cuda").numel() == 0, !torch::cuda::is_available());
  set_random_state(state);
}

TEST(RandomState, RefusesWhatIsNone) {
  const auto before = tensor_at(random_state(), "torch");
  const auto of = [](const at::Tensor& bytes) { return torch_alone(leaf_of(bytes)); };
  EXPECT_EQ(code_of([&] { set_random_state(of(torch::zeros(10, torch::kByte))); }),
            ErrorCode::corrupt);
  EXPECT_EQ(code_of([&] { set_random_state(of(torch::full({5056}, 255, torch::kByte))); }),
            ErrorCode::corrupt);
  EXPECT_EQ(code_of([&] { set_random_state(of(torch::zeros(5056))); }), ErrorCode::mismatch);
  EXPECT_EQ(code_of([&] { set_random_state(torch_alone("text")); }), ErrorCode::mismatch);
  EXPECT_EQ(code_of([&] { set_random_state(Value()); }), ErrorCode::mismatch);
  EXPECT_TRUE(torch::equal(tensor_at(random_state(), "torch"), before));
}

// OQ-15: rank 0 goes on where it was; each other rank has numbers of its own, the same each time.
TEST(RandomState, OfOtherRanksIsDerivedFromRankZeros_OQ15) {
  const auto saved = random_state(Value::dict({{"python", 1}}));
  EXPECT_TRUE(derived_random_state(saved, 0) == saved);
  std::set<double> first;
  for (int rank = 0; rank < 64; ++rank) {
    const auto derived = derived_random_state(saved, rank);
    EXPECT_EQ(derived.find("python") == nullptr, rank > 0);
    set_random_state(derived);
    const auto drawn = torch::rand(1, torch::kFloat64);
    set_random_state(derived_random_state(saved, rank));
    EXPECT_TRUE(torch::equal(torch::rand(1, torch::kFloat64), drawn));
    first.insert(drawn.item<double>());
  }
  EXPECT_EQ(first.size(), 64U);
}

}  // namespace
}  // namespace tessera
