// What a refused call leaves: all that is checked is checked before anything is changed. Each
// public call of the runtime fails at its checks, in every way of wrapping, and the module, its
// parameters and gradients, the optimizer and the course of the training are what they were.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/grad_scaler.h"
#include "tessera/optim.h"
#include "tessera/optimizer_ref.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/training_state.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::run_mesh;

enum class Wrapping { rows, flat, flat_original, replicated };

struct Untouched {
  testing::Net net{nullptr};
  std::optional<AdamW> optimizer;
  std::vector<ShardedParameter> parameters;

  Untouched(Wrapping kind, const Mesh& mesh) : net(testing::make_net({.blocks = 2})) {
    wrap(kind, mesh);
    parameters = sharded_parameters(net);
    optimizer.emplace(parameters);
  }

  double step(int rank) {
    net->zero_grad();
    const auto tokens = torch::arange(rank, rank + 6).remainder(testing::kVocabulary);
    auto loss = net(tokens).square().mean();
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }

 private:
  void wrap(Wrapping kind, const Mesh& mesh) {
    if (kind == Wrapping::rows) return testing::shard(net, mesh);
    if (kind == Wrapping::replicated) return replicate(net, mesh);
    FullyShardedOptions options;
    options.use_orig_params = kind == Wrapping::flat_original;
    const FullyShardedDataParallel<testing::Net> wrapped(net, mesh, options);
  }
};

// Everything that a program can see of it.
struct Visible {
  std::vector<std::string> names;
  std::vector<const void*> tensors;
  std::vector<torch::Tensor> values, gradients, moments;
  std::vector<bool> trained;
  std::vector<double> options;

  explicit Visible(const Untouched& training) {
    for (const auto& entry : training.net->named_parameters()) {
      names.push_back(entry.key());
      tensors.push_back(entry.value().unsafeGetTensorImpl());
      trained.push_back(entry.value().requires_grad());
    }
    for (const auto& entry : training.net->named_buffers()) names.push_back(entry.key());
    for (const auto& parameter : training.parameters) {
      tensors.push_back(parameter.local.unsafeGetTensorImpl());
      values.push_back(parameter.local.detach().clone());
      const auto& gradient = parameter.local.grad();
      gradients.push_back(gradient.defined() ? gradient.clone() : torch::Tensor());
    }
    const auto& optimizer = *training.optimizer;
    for (std::size_t i = 0; i < optimizer.parameters().size(); ++i) {
      const auto& state = optimizer.state(0, i);
      for (const auto& moment : {state.step, state.exp_avg, state.exp_avg_sq})
        moments.push_back(moment.defined() ? moment.clone() : torch::Tensor());
    }
    const auto& now = optimizer.options();
    options = {now.lr, now.beta1, now.beta2, now.eps, now.weight_decay};
  }

  static bool same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
      return x.defined() == y.defined() && (!x.defined() || torch::equal(x, y));
    });
  }
  [[nodiscard]] std::string difference(const Visible& other) const {
    if (names != other.names) return "names";
    if (tensors != other.tensors) return "tensors";
    if (trained != other.trained) return "requires_grad";
    if (!same(values, other.values)) return "values";
    if (!same(gradients, other.gradients)) return "gradients";
    if (!same(moments, other.moments)) return "moments";
    return options == other.options ? "" : "options";
  }
};

struct RefusedCall {
  const char* name;
  std::function<void(Untouched&, Mesh&)> call;
  std::vector<Wrapping> kinds = {Wrapping::rows, Wrapping::flat, Wrapping::flat_original,
                                 Wrapping::replicated};
};

// A whole state that lacks its last entry, or has one of another shape or name.
FullState damaged_state(Untouched& training, int how) {
  const auto whole = full_state_dict(training.net);
  FullState state;
  for (const auto& entry : whole) {
    const bool is_last = entry.key() == whole.back().key();
    if (is_last && how == 0) continue;
    const auto name = is_last && how == 2 ? entry.key() + "x" : entry.key();
    state.insert(name, is_last && how == 1 ? torch::ones({3, 2}) : entry.value() + 1);
  }
  return state;
}

Value damaged_optimizer(Untouched& training, const char* key) {
  auto state = optimizer_state_dict(*training.optimizer);
  if (key == nullptr) {
    Value::List groups = state.at("param_groups").items();
    groups.push_back(groups.front());
    state.set_item("param_groups", Value::list(std::move(groups)));
    return state;
  }
  auto first = state.at("state").pairs().front();
  first.second.set_item(key, Value(std::string("no number")));
  state.at("state").set_item(first.first, first.second);
  return state;
}

const std::vector<RefusedCall>& refused_calls() {
  using T = Untouched&;
  using M = Mesh&;
  static const std::vector<RefusedCall> rows = {
      {"fully_shard of a unit", [](T t, M m) { fully_shard(t.net, m); }},
      {"replicate of a unit", [](T t, M m) { replicate(t.net, m); }},
      {"fully_shard inside of a unit", [](T t, M m) { fully_shard(t.net->head, m); }},
      {"FSDP1 around a unit",
       [](T t, M m) { const FullyShardedDataParallel<testing::Net> wrapped(t.net, m, {}); }},
      {"a parameter twice in AdamW",
       [](T t, M) {
         auto twice = t.parameters;
         twice.push_back(twice.front());
         const AdamW optimizer(twice);
       }},
      {"a state of another shape",
       [](T t, M) {
         const auto odd = torch::ones({1, 2, 3});
         t.optimizer->set_state(0, 0, {torch::tensor(1.0F), odd, odd});
       }},
      {"a whole state without an entry",
       [](T t, M) { load_full_state_dict(t.net, damaged_state(t, 0)); }},
      {"a whole state of another shape",
       [](T t, M) { load_full_state_dict(t.net, damaged_state(t, 1)); }},
      {"a whole state with another name",
       [](T t, M) { load_full_state_dict(t.net, damaged_state(t, 2)); }},
      {"a state dict without entries", [](T t, M) { load_state_dict(t.net, Value::dict({})); }},
      {"optimizer state with a group more",
       [](T t, M) { load_optimizer_state_dict(*t.optimizer, damaged_optimizer(t, nullptr)); }},
      {"optimizer state with a text as a moment",
       [](T t, M) { load_optimizer_state_dict(*t.optimizer, damaged_optimizer(t, "exp_avg")); }},
      {"optimizer state with a text as a step",
       [](T t, M) { load_optimizer_state_dict(*t.optimizer, damaged_optimizer(t, "step")); }},
      {"a divide factor of zero", [](T t, M) { set_gradient_divide_factor(t.net, 0); }},
      {"a divide factor that is not a number",
       [](T t, M) { set_gradient_divide_factor(t.net, std::nan("")); }},
      {"no buffers to reduce in", [](T t, M) { set_reduce_scatter_max_input_buffers(t.net, 0); }},
      {"prefetch of what is no unit",
       [](T t, M) { set_modules_to_forward_prefetch(t.net, {t.net->head}); },
       {Wrapping::rows}},
      {"changes of rank 0 alone",
       [](T t, M) { const FullParams whole(t.net, {.rank0_only = true}); },
       {Wrapping::rows, Wrapping::flat, Wrapping::flat_original}},
      {"the local kind of what is no flat parameter",
       [](T t, M) {
         const StateDictTypeScope scope(t.net, {.type = StateDictType::local});
         (void)state_dict(t.net);
       },
       {Wrapping::rows}},
      {"a checkpoint that is not there",
       [](T t, M m) {
         TrainingState state(t.net, OptimizerRef(*t.optimizer));
         load(state, "/nothing/is/here", m.checkpoint_group());
       }},
      {"a tree of names that the model lacks",
       [](T t, M) {
         Value state = state_dict(t.net);
         state.set_item("more", Value(1));
         load_state_dict(t.net, state);
       }},
      {"a scaler's state that is none",
       [](T, M m) {
         ShardedGradScaler scaler(m);
         scaler.load_state_dict(Value::dict({{"scale", Value(std::string("x"))}}));
       }},
  };
  return rows;
}

// Empty: it was refused, and nothing has changed.
std::string fault_of(const RefusedCall& row, Untouched& training, Mesh& mesh) {
  const Visible before(training);
  try {
    row.call(training, mesh);
    return "was not refused";
  } catch (const Error&) {
    // As it has to be.
  } catch (const std::exception& error) {
    return std::string("no Error: ") + error.what();
  }
  const auto difference = before.difference(Visible(training));
  return difference.empty() ? "" : "changed: " + difference;
}

void refuse_all(Wrapping kind, Mesh& mesh) {
  Untouched training(kind, mesh), other(kind, mesh);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(training.step(mesh.rank()), other.step(mesh.rank()));
  for (const auto& row : refused_calls()) {
    if (std::ranges::find(row.kinds, kind) == row.kinds.end()) continue;
    EXPECT_EQ(fault_of(row, training, mesh), "") << row.name << ", kind " << static_cast<int>(kind);
    mesh.group().barrier();
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(training.step(mesh.rank()), other.step(mesh.rank()));
}

TEST(RefusedCalls, ChangeNothing) {
  for (const auto kind :
       {Wrapping::rows, Wrapping::flat, Wrapping::flat_original, Wrapping::replicated})
    run_mesh(2, [kind](Mesh& mesh) { refuse_all(kind, mesh); });
}

}  // namespace
}  // namespace tessera
