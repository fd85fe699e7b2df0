#include "optim_state/test_states.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "optim_state/test_models.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera::testing {

struct Lobby {
  c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;  // sanitizers see no order in what ranks say to each other
  Value posted;
};

std::optional<Mesh> Rank::halved() {
  const auto prefix = "half" + std::to_string(halves_++);
  if (mesh.rank() % 2 != 0) return std::nullopt;
  MeshOptions options;
  options.device = torch::kCPU;
  options.deadline = std::chrono::seconds(30);
  const int size = (mesh.size() + 1) / 2;
  if (size == 1) return Mesh(options);
  return Mesh(c10::make_intrusive<c10d::PrefixStore>(prefix, lobby_.store), mesh.rank() / 2, size,
              options);
}

Value Rank::broadcast(const Value& tree, const Mesh& group) {
  const auto exchanged = [&](const Value& from, Value& to) {
    const std::lock_guard lock(lobby_.mutex);
    to = copy_of(from);
  };
  if (group.rank() == 0) exchanged(tree, lobby_.posted);
  group.group().barrier();
  Value mine;
  exchanged(lobby_.posted, mine);
  group.group().barrier();
  return mine;
}

void run_worlds(const CaseBody& body, const std::vector<int>& worlds) {
  for (const int world : worlds) {
    Lobby lobby;
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    const bool failed_before = test->result()->Failed();
    try {
      run_mesh(world, [&](Mesh& mesh) {
        Rank rank(mesh, lobby);
        body(rank);
      });
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
    if (!failed_before && test->result()->Failed()) {
      ADD_FAILURE() << "first failed on " << world << " ranks";
      return;
    }
  }
}

namespace {

class RegisteredCase : public ::testing::Test {
 public:
  explicit RegisteredCase(CaseBody body) : body_(std::move(body)) {}
  void TestBody() override { run_worlds(body_); }

 private:
  CaseBody body_;
};

}  // namespace

bool register_cases(const std::vector<Case>& cases) {
  for (const auto& [name, body] : cases) {
    ::testing::RegisterTest("FsdpOptimState", name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            [body = body] { return new RegisteredCase(body); });
  }
  return true;
}

std::string flag(const char* name, bool value) {
  return std::string("_") + name + (value ? "_True" : "_False");
}

// Trees ---------------------------------------------------------------------------------------

namespace {

::testing::AssertionResult differ(const std::string& where, const std::string& what) {
  return ::testing::AssertionFailure() << (where.empty() ? "the root" : where) << ": " << what;
}

std::string text_of(const Value& key) {
  return key.is(Value::Kind::integer) ? std::to_string(key.as_int()) : key.as_string();
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all = "[";
  for (const auto& text : texts) all += (all.size() > 1 ? ", " : "") + text;
  return all + "]";
}

::testing::AssertionResult same_tensors(const Value& a, const Value& b, Tolerance tolerance,
                                        const std::string& where) {
  const auto& left = a.as_tensor();
  const auto& right = b.as_tensor();
  if (left.dtype != right.dtype) return differ(where, "another dtype");
  if (left.shape != right.shape) {
    return differ(where, "shape " + to_string(left.shape) + ", not " + to_string(right.shape));
  }
  const auto mine = tensor_in(a), theirs = tensor_in(b);
  if (mine.sizes() != theirs.sizes()) return differ(where, "another part of the tensor");
  const bool is_same = tolerance.relative == 0 && tolerance.absolute == 0
                           ? torch::equal(mine, theirs)
                           : torch::allclose(mine, theirs, tolerance.relative, tolerance.absolute);
  if (is_same) return ::testing::AssertionSuccess();
  const auto most = (mine - theirs).abs().max().item<double>();
  return differ(where, "values differ by up to " + std::to_string(most) + " of " +
                           std::to_string(theirs.abs().max().item<double>()));
}

::testing::AssertionResult same_at(const Value& a, const Value& b, Tolerance tolerance,
                                   const std::string& where) {
  const auto is_number = [](const Value& value) {
    return value.is(Value::Kind::integer) || value.is(Value::Kind::real);
  };
  // Python's 0 equals 0.0.
  if (is_number(a) && is_number(b) && a.as_real() == b.as_real())
    return ::testing::AssertionSuccess();
  if (a.kind() != b.kind()) return differ(where, "another kind of value");
  if (a.is(Value::Kind::tensor)) return same_tensors(a, b, tolerance, where);
  if (a.is(Value::Kind::dict)) {
    if (a.size() != b.size()) {
      return differ(where, "keys " + joined(keys_of(a)) + ", not " + joined(keys_of(b)));
    }
    for (const auto& [key, value] : a.pairs()) {
      const auto* other = find_key(b, key);
      if (other == nullptr) return differ(where, "no key " + text_of(key));
      auto result = same_at(value, *other, tolerance, where + "/" + text_of(key));
      if (!result) return result;
    }
    return ::testing::AssertionSuccess();
  }
  if (a.is(Value::Kind::list) || a.is(Value::Kind::tuple)) {
    if (a.size() != b.size()) return differ(where, "another number of items");
    for (std::size_t i = 0; i < a.size(); ++i) {
      auto result = same_at(a.items()[i], b.items()[i], tolerance, where + "/" + std::to_string(i));
      if (!result) return result;
    }
    return ::testing::AssertionSuccess();
  }
  return a == b ? ::testing::AssertionSuccess() : differ(where, "another value");
}

}  // namespace

::testing::AssertionResult same(const Value& a, const Value& b, Tolerance tolerance) {
  return same_at(a, b, tolerance, "");
}

Value copy_of(const Value& tree) {
  if (tree.is(Value::Kind::dict)) {
    std::vector<Value::Pair> pairs;
    for (const auto& [key, value] : tree.pairs()) pairs.emplace_back(key, copy_of(value));
    return Value::dict(std::move(pairs), tree.dict_kind());
  }
  if (tree.is(Value::Kind::list) || tree.is(Value::Kind::tuple)) {
    Value::List items;
    for (const auto& item : tree.items()) items.push_back(copy_of(item));
    return tree.is(Value::Kind::list) ? Value::list(std::move(items))
                                      : Value::tuple(std::move(items));
  }
  if (!tree.is(Value::Kind::tensor)) return tree;
  auto leaf = tree.as_tensor();
  for (auto& piece : leaf.pieces) {
    if (!piece.storage || piece.storage->data == nullptr) continue;
    auto bytes = std::make_shared<std::vector<std::byte>>(
        piece.storage->data, piece.storage->data + piece.storage->size);
    auto storage = std::make_shared<Storage>(*piece.storage);
    storage->data = bytes->data();
    storage->owner = std::move(bytes);
    piece.storage = std::move(storage);
  }
  return Value(std::move(leaf));
}

at::Tensor tensor_in(const Value& value) {
  const auto& leaf = value.as_tensor();
  const auto type = scalar_type_of(leaf.dtype);
  if (numel(leaf.shape) == 0) return torch::empty(leaf.shape, type);
  if (!leaf.sharded) return tensor_of(leaf);
  std::vector<at::Tensor> parts = {torch::empty({0}, type)};
  for (const auto& piece : leaf.pieces) {
    if (!piece.storage) continue;
    const auto& box = std::get<Box>(piece.slice);
    auto* first =
        piece.storage->data + piece.storage_offset * static_cast<std::int64_t>(size_of(leaf.dtype));
    parts.push_back(torch::from_blob(first, {numel(box.sizes)}, type).clone());
  }
  return torch::cat(parts);
}

const Value* find_key(const Value& dict, const Value& key) {
  const auto& pairs = dict.pairs();
  const auto at = std::ranges::find(pairs, key, &Value::Pair::first);
  return at == pairs.end() ? nullptr : &at->second;
}

std::vector<std::string> keys_of(const Value& dict) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : dict.pairs()) keys.push_back(text_of(key));
  return keys;
}

std::vector<std::string> texts_of(const Value& list) {
  std::vector<std::string> texts;
  for (const auto& item : list.items()) texts.push_back(text_of(item));
  return texts;
}

Value without(const Value& dict, std::string_view key) {
  std::vector<Value::Pair> pairs;
  for (const auto& pair : dict.pairs()) {
    if (!(pair.first == Value(std::string(key)))) pairs.push_back(pair);
  }
  return Value::dict(std::move(pairs), dict.dict_kind());
}

void check_same_state(const Value& state_dict, const Value& reference, Keys keys) {
  const auto& mine = state_dict.at("state");
  const auto& expected = reference.at("state");
  if (keys == Keys::same) {
    EXPECT_TRUE(same(mine, expected, kAssertEqual));
    return;
  }
  EXPECT_EQ(mine.size(), expected.size());
  for (const auto& [key, state] : mine.pairs()) {
    const bool found = std::ranges::any_of(expected.pairs(), [&](const auto& entry) {
      return static_cast<bool>(same(state, entry.second, kIsClose));
    });
    EXPECT_TRUE(found) << "nothing equals the state of " << text_of(key);
  }
}

void check_same_param_groups(const Value& state_dict, const Value& reference, Keys keys) {
  const auto& mine = state_dict.at("param_groups").items();
  const auto& expected = reference.at("param_groups").items();
  EXPECT_EQ(mine.size(), expected.size());
  for (std::size_t i = 0; i < std::min(mine.size(), expected.size()); ++i) {
    EXPECT_EQ(mine[i].at("params").size(), expected[i].at("params").size()) << "group " << i;
    if (keys == Keys::same) {
      EXPECT_TRUE(same(mine[i], expected[i])) << "group " << i;
    } else {
      EXPECT_TRUE(same(without(mine[i], "params"), without(expected[i], "params")))
          << "group " << i;
    }
  }
}

void check_same(const Value& state_dict, const Value& reference, Keys keys) {
  check_same_param_groups(state_dict, reference, keys);
  check_same_state(state_dict, reference, keys);
}

// Training ------------------------------------------------------------------------------------

Trained init_nested(const TrainedOptions& options) {
  NestedModel model;
  if (options.mesh != nullptr) {
    wrap_nested(model, *options.mesh,
                {.alternative = options.alternative, .use_orig_params = options.use_orig_params});
  }
  OptimInput input = {local_tensors(sharded_parameters(model))};
  if (options.multiple_groups) input = {param_group0(model), param_group1(model)};
  if (options.reversed) {
    for (auto& group : input) std::ranges::reverse(group);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : input) {
    auto adam = std::make_unique<torch::optim::AdamOptions>(0.01);
    if (!groups.empty()) adam->weight_decay(0.9);
    groups.emplace_back(group, std::move(adam));
  }
  return {model.ptr(),
          [model](at::Generator& generator) mutable {
            return model(torch::randn({8, 5}, generator)).sum();
          },
          std::make_unique<torch::optim::Adam>(std::move(groups), torch::optim::AdamOptions(0.01)),
          std::move(input)};
}

Trained init_transformer(const TrainedOptions& options) {
  TransformerModel model;
  if (options.mesh != nullptr) wrap_transformer(model, *options.mesh, options.use_orig_params);
  return {model.ptr(), [model](at::Generator&) mutable { return transformer_loss(model); },
          make_adam(model, 0.01), std::nullopt};
}

std::vector<double> step_model(Trained& trained, int steps) {
  auto generator = generator_of(0);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    trained.optim->zero_grad();
    const auto loss = trained.loss(generator);
    losses.push_back(loss.item<double>());
    loss.backward();
    trained.optim->step();
  }
  return losses;
}

void give_zero_gradients(ModuleRef module) {
  for (const auto& parameter : sharded_parameters(module)) {
    if (!parameter.local.requires_grad()) continue;
    parameter.local.mutable_grad() = torch::zeros_like(parameter.local);
  }
}

}  // namespace tessera::testing
