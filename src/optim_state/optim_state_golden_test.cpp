// Optimizer state beside PyTorch's: where FSDP1 puts what (spec section 12), and what it saves of
// Adam (tests/golden/make/optim_state.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "fsdp/testing/counting_transport.h"
#include "fsdp/unit/registry.h"
#include "optim_state/test_models.h"
#include "optim_state/test_states.h"
#include "tessera/checkpoint.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

// Layouts -------------------------------------------------------------------------------------

// A unit's shard on 2 and on 4 ranks.
struct Row {
  std::string unit;
  std::vector<std::int64_t> elements;  // of its parameters
  // Without use_orig_params: elements a shard, and what of it fills up the ranks' ranges.
  std::int64_t flat2 = 0;
  std::vector<std::int64_t> pads2;
  std::int64_t flat4 = 0;
  std::vector<std::int64_t> pads4;
  // With it: all elements with what fills the gaps.
  std::int64_t original2 = 0, original4 = 0;
};

const std::vector<Row> kNested = {
    {"block1", {21, 7}, 14, {0, 0}, 7, {0, 0, 0, 0}, 32, 32},
    {"block1.bias_module0", {7}, 4, {0, 1}, 2, {0, 0, 0, 1}, 8, 8},
    {"block2.1", {81}, 41, {0, 1}, 21, {0, 0, 0, 3}, 82, 84},
    {"block2.1.bias_module0", {9}, 5, {0, 1}, 3, {0, 0, 0, 3}, 10, 12},
    {"block2.1.bias_module1", {9}, 5, {0, 1}, 3, {0, 0, 0, 3}, 10, 12},
    {"block2.2", {45, 5, 5}, 28, {0, 1}, 14, {0, 0, 0, 1}, 62, 64},
};
const Row kIgnoring = {"block2.2", {45, 5}, 25, {0, 0}, 13, {0, 0, 0, 2}, 54, 56};
const Row kUnmanaged = {"block2.2", {45, 25, 5, 5}, 40, {0, 0}, 20, {0, 0, 0, 0}, 90, 92};
const std::vector<Row> kAlternative = {
    {"block0", {15, 3}, 9, {0, 0}, 5, {0, 0, 0, 2}, 20, 20},
    {"block0.bias_module0", {3}, 2, {0, 1}, 1, {0, 0, 0, 1}, 4, 4},
};
const Row kLinear = {"lin2", {25, 5}, 15, {0, 0}, 8, {0, 0, 0, 2}, 34, 36};
const std::vector<Row> kSimple = {{"", {8, 4}, 6, {0, 0}, 3, {0, 0, 0, 0}, 12, 12}};
const std::vector<Row> kDummy = {
    {"", {128, 16, 512, 32, 2048, 64, 512, 8}, 1660, {0, 0}, 830, {0, 0, 0, 0}, 3320, 3320}};
const std::vector<std::int64_t> kEncoder = {768, 48, 256, 16, 128, 8, 128, 16, 16, 16, 16, 16};
const std::vector<std::int64_t> kDecoder = {768, 48,  256, 16, 768, 48, 256, 16, 128,
                                            8,   128, 16,  16, 16,  16, 16,  16, 16};
const std::vector<Row> kTransformer = {
    {"", {368, 16, 16, 16, 16, 23, 2, 2}, 230, {0, 1}, 115, {0, 0, 0, 1}, 462, 464},
    {"transformer.encoder.layers.0", kEncoder, 716, {0, 0}, 358, {0, 0, 0, 0}, 1432, 1432},
    {"transformer.encoder.layers.1", kEncoder, 716, {0, 0}, 358, {0, 0, 0, 0}, 1432, 1432},
    {"transformer.decoder.layers.0", kDecoder, 1276, {0, 0}, 638, {0, 0, 0, 0}, 2552, 2552},
    {"transformer.decoder.layers.1", kDecoder, 1276, {0, 0}, 638, {0, 0, 0, 0}, 2552, 2552},
};

using Unit = std::shared_ptr<detail::Unit>;
std::map<std::string, Unit> units_of(ModuleRef module) {
  const auto units = detail::units_below(module.get());
  return {units.begin(), units.end()};
}

void expect_row(const std::map<std::string, Unit>& units, const Row& row, int world,
                bool original) {
  SCOPED_TRACE(row.unit + " on " + std::to_string(world) + (original ? " original" : " flat"));
  const auto& layout = units.at(row.unit)->layout();
  std::vector<std::int64_t> elements;
  for (const auto& param : layout.params) elements.push_back(param.elements);
  EXPECT_EQ(elements, row.elements);
  const auto all = world == 2 ? row.original2 : row.original4;
  const auto flat = world == 2 ? row.flat2 : row.flat4;
  EXPECT_EQ(layout.shard_elements, original ? all / world : flat);
  EXPECT_EQ(layout.gathered_elements, original ? all : flat * world);
  std::vector<std::int64_t> pads;
  for (const auto& runs : layout.runs) {
    auto pad = layout.shard_elements;
    for (const auto& run : runs) pad -= run.count;
    pads.push_back(pad);
  }
  if (original) return;
  EXPECT_EQ(pads, world == 2 ? row.pads2 : row.pads4);
}

void expect_rows(ModuleRef module, const std::vector<Row>& rows, int world, bool original) {
  const auto units = units_of(module);
  EXPECT_EQ(units.size(), rows.size());
  for (const auto& row : rows) expect_row(units, row, world, original);
}

TEST(OptimStateLayout, IsThatOfPytorchsFlatParameters_1_3_12) {
  for (const bool original : kBoth) {
    run_worlds(
        [&](Rank& rank) {
          const int world = rank.mesh.size();
          const auto nested = [&](const NestedOptions& options) {
            NestedModel model;
            wrap_nested(model, rank.mesh, options);
            return model;
          };
          expect_rows(nested({.use_orig_params = original}), kNested, world, original);
          expect_rows(nested({.alternative = true, .use_orig_params = original}), kAlternative,
                      world, original);
          expect_row(units_of(nested({.ignore_modules = true, .use_orig_params = original})),
                     kIgnoring, world, original);
          NestedModel unmanaged;
          add_unmanaged_param(unmanaged, true);
          wrap_nested(unmanaged, rank.mesh, {.use_orig_params = original});
          expect_row(units_of(unmanaged), kUnmanaged, world, original);
          TwoLinears linears;
          fsdp(linears->lin2, rank.mesh, {.use_orig_params = original});
          expect_row(units_of(linears), kLinear, world, original);
          const FullyShardedOptions options{.use_orig_params = original};
          expect_rows(fsdp(SimpleModel(), rank.mesh, options), kSimple, world, original);
          expect_rows(fsdp(DummyModel(), rank.mesh, options), kDummy, world, original);
          TransformerModel transformer;
          wrap_transformer(transformer, rank.mesh, original);
          expect_rows(transformer, kTransformer, world, original);
        },
        {2, 4});
  }
}

// What a rank has of a unit: parameter, first element of the shard, count, first element of the
// parameter (_shard_param_infos).
using Held = std::tuple<std::size_t, std::int64_t, std::int64_t, std::int64_t>;
std::vector<Held> held_by(const Unit& unit, int rank) {
  std::vector<Held> held;
  for (const auto& run : unit->layout().runs.at(rank))
    held.emplace_back(run.param, run.local, run.count, run.global);
  return held;
}

TEST(OptimStateLayout, SaysWhatEachRankHoldsOfAParameter_12) {
  run_worlds(
      [](Rank& rank) {
        const int world = rank.mesh.size();
        NestedModel flat, original;
        wrap_nested(flat, rank.mesh);
        wrap_nested(original, rank.mesh, {.use_orig_params = true});
        const auto dummy = fsdp(DummyModel(), rank.mesh, {.use_orig_params = true});
        if (world == 2) {
          const auto unit = units_of(flat)["block1"];
          EXPECT_THAT(held_by(unit, 0), ElementsAre(Held{0, 0, 14, 0}));
          EXPECT_THAT(held_by(unit, 1), ElementsAre(Held{0, 0, 7, 14}, Held{1, 7, 7, 0}));
          const auto other = units_of(original)["block1"];
          EXPECT_THAT(held_by(other, 0), ElementsAre(Held{0, 0, 16, 0}));
          EXPECT_THAT(held_by(other, 1), ElementsAre(Held{0, 0, 5, 16}, Held{1, 8, 7, 0}));
          return;
        }
        const auto unit = units_of(original)["block2.2"];
        EXPECT_THAT(held_by(unit, 0), ElementsAre(Held{0, 0, 16, 0}));
        EXPECT_THAT(held_by(unit, 1), ElementsAre(Held{0, 0, 16, 16}));
        EXPECT_THAT(held_by(unit, 2), ElementsAre(Held{0, 0, 13, 32}));
        EXPECT_THAT(held_by(unit, 3), ElementsAre(Held{1, 0, 5, 0}, Held{2, 8, 5, 0}));
        EXPECT_TRUE(held_by(units_of(flat)["block2.1.bias_module0"], 3).empty());
        const auto whole = units_of(dummy)[""];
        EXPECT_THAT(held_by(whole, 0),
                    ElementsAre(Held{0, 0, 128, 0}, Held{1, 128, 16, 0}, Held{2, 144, 512, 0},
                                Held{3, 656, 32, 0}, Held{4, 688, 142, 0}));
        EXPECT_THAT(held_by(whole, 1), ElementsAre(Held{4, 0, 830, 142}));
        EXPECT_THAT(held_by(whole, 2), ElementsAre(Held{4, 0, 830, 972}));
        EXPECT_THAT(held_by(whole, 3), ElementsAre(Held{4, 0, 246, 1802}, Held{5, 246, 64, 0},
                                                   Held{6, 310, 512, 0}, Held{7, 822, 8, 0}));
      },
      {2, 4});
}

// The names of what an optimizer's numbers stand for.
std::vector<std::string> named(ModuleRef module, const std::vector<torch::Tensor>& params) {
  std::map<const c10::TensorImpl*, std::string> names;
  for (const auto& parameter : sharded_parameters(module))
    names[parameter.local.unsafeGetTensorImpl()] = parameter.name();
  std::vector<std::string> result;
  for (const auto& param : params) result.push_back(names.at(param.unsafeGetTensorImpl()));
  return result;
}

TEST(OptimStateLayout, NumbersParametersAsPytorchDoes_12) {
  run_worlds(
      [](Rank& rank) {
        const auto nested = init_nested({.mesh = &rank.mesh});
        EXPECT_THAT(named(nested.module, nested.input->at(0)),
                    ElementsAre("bias", "block0.weight", "block0.bias_module0.bias",
                                "block0.bias_module1.bias", "block1._flat_param",
                                "block1.bias_module0._flat_param", "block2.0.weight",
                                "block2.0.bias_module0.bias", "block2.0.bias_module1.bias",
                                "block2.1._flat_param", "block2.1.bias_module0._flat_param",
                                "block2.1.bias_module1._flat_param", "block2.2._flat_param"));
        const auto groups = init_nested({.mesh = &rank.mesh, .multiple_groups = true});
        EXPECT_THAT(named(groups.module, groups.input->at(0)),
                    ElementsAre("block1._flat_param", "block1.bias_module0._flat_param"));
        EXPECT_THAT(
            named(groups.module, groups.input->at(1)),
            ElementsAre("block2.0.weight", "block2.0.bias_module0.bias",
                        "block2.0.bias_module1.bias", "block2.1._flat_param",
                        "block2.1.bias_module0._flat_param", "block2.1.bias_module1._flat_param",
                        "block2.2._flat_param", "block0.weight", "block0.bias_module0.bias",
                        "block0.bias_module1.bias"));
        const auto alternative = init_nested({.mesh = &rank.mesh, .alternative = true});
        const auto names = named(alternative.module, alternative.input->at(0));
        EXPECT_EQ(names.size(), 15u);
        EXPECT_EQ(names[1], "block0._flat_param");
        EXPECT_EQ(names[2], "block0.bias_module0._flat_param");
      },
      {2, 4});
}

TEST(OptimStateLayout, HasStateWhereAShardHoldsPartOfAParameter_12) {
  run_worlds(
      [](Rank& rank) {
        auto trained = init_nested({.mesh = &rank.mesh, .use_orig_params = true});
        step_model(trained, 1);
        std::set<std::string> without;
        const auto state = optimizer_state_dict(*trained.optim).at("state");
        for (int id = 0; id < 16; ++id) {
          const auto* entry = find_key(state, Value(id));
          if (entry == nullptr || tensor_in(entry->at("exp_avg")).numel() == 0)
            without.insert(std::to_string(id));
        }
        const std::map<std::pair<int, int>, std::set<std::string>> expected = {
            {{2, 0}, {"6", "14", "15"}}, {{2, 1}, {}}, {{4, 3}, {"4", "11", "12", "13"}}};
        const auto at = expected.find({rank.mesh.size(), rank.mesh.rank()});
        if (at == expected.end()) return;
        EXPECT_EQ(without, at->second);
      },
      {2, 4});
}

// The begin and the sizes of the one piece that this rank has; empty: it has none.
std::vector<Shape> piece_of(const Value& leaf) {
  const auto& tensor = leaf.as_tensor();
  std::vector<Shape> boxes;
  for (const auto& piece : tensor.pieces) {
    if (!piece.storage) continue;
    const auto& box = std::get<Box>(piece.slice);
    boxes.push_back(box.offsets);
    boxes.push_back(box.sizes);
  }
  return boxes;
}

TEST(OptimStateLayout, ChunksShardedStateByRows_L5_12) {
  for (const bool original : kBoth) {
    run_worlds(
        [&](Rank& rank) {
          auto trained = init_nested({.mesh = &rank.mesh, .use_orig_params = original});
          step_model(trained, 1);
          const auto saved = sharded_optim_state_dict(trained.module, *trained.optim);
          const auto& state = saved.at("state");
          const auto weight = state.at("block1.weight").at("exp_avg");
          const auto bias = state.at("block2.2.bias_module0.bias").at("exp_avg_sq");
          EXPECT_TRUE(weight.as_tensor().sharded);
          EXPECT_EQ(weight.as_tensor().shape, (Shape{3, 7}));
          const int r = rank.mesh.rank();
          const std::vector<Shape> none;
          if (rank.mesh.size() == 2) {
            EXPECT_THAT(piece_of(weight), r == 0 ? ElementsAre(Shape{0, 0}, Shape{2, 7})
                                                 : ElementsAre(Shape{2, 0}, Shape{1, 7}));
          } else if (r < 3) {
            EXPECT_THAT(piece_of(weight), ElementsAre(Shape{r, 0}, Shape{1, 7}));
            EXPECT_THAT(piece_of(bias), ElementsAre(Shape{2 * r}, Shape{r == 2 ? 1 : 2}));
          } else {
            EXPECT_EQ(piece_of(weight), none);
            EXPECT_EQ(piece_of(bias), none);
          }
          EXPECT_FALSE(state.at("bias").at("exp_avg").as_tensor().sharded);
          EXPECT_EQ(state.at("bias").at("exp_avg").as_tensor().pieces.size(), 1u);
          EXPECT_FALSE(state.at("block1.weight").at("step").as_tensor().sharded);
        },
        {2, 4});
  }
}

// Beside PyTorch ------------------------------------------------------------------------------

struct Golden {
  Value tree;
  explicit Golden(const std::string& name)
      : tree(
            Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/optim_state/" + name + ".pt")
                .load()) {}
  [[nodiscard]] const Value& state_dict(bool original) const {
    return tree.at(original ? "original" : "flat");
  }
};

// The order of every dict too.
void expect_same_order(const Value& mine, const Value& theirs, const std::string& where) {
  if (mine.is(Value::Kind::dict)) {
    ASSERT_EQ(keys_of(mine), keys_of(theirs)) << where;
    for (const auto& [key, value] : mine.pairs())
      expect_same_order(value, *find_key(theirs, key), where + "/" + key.as_string());
  } else if (mine.is(Value::Kind::list)) {
    ASSERT_EQ(mine.size(), theirs.size()) << where;
    for (std::size_t i = 0; i < mine.size(); ++i)
      expect_same_order(mine.items()[i], theirs.items()[i], where + "/" + std::to_string(i));
  }
}

using Parameters = std::tuple<std::string, bool>;
class OptimStateBesidePytorch : public ::testing::TestWithParam<Parameters> {};

TEST_P(OptimStateBesidePytorch, IsTheSameAfterTheSameSteps_L4) {
  const auto [name, original] = GetParam();
  const Golden golden(name);
  run_mesh(2, [&, name = name, original = original](Mesh& mesh) {
    auto peer = make_peer(name, golden.tree.at("weights"), mesh, original);
    const auto& batches = golden.tree.at("batches").items();
    for (std::size_t step = 0; step < batches.size(); ++step) {
      peer.optim->zero_grad();
      const auto loss = peer.loss(tensor_in(batches[step]));
      const auto expected = golden.tree.at("losses").items()[step].as_real();
      EXPECT_NEAR(loss.item<double>(), expected, 1e-6 * std::abs(expected));
      loss.backward();
      peer.optim->step();
    }
    const auto saved = full_optim_state_dict(peer.module, *peer.optim, {.rank0_only = false});
    const auto& expected = golden.state_dict(original);
    EXPECT_TRUE(same(saved, expected, {1e-6, 1e-6}));
    expect_same_order(saved, expected, "");
  });
}

TEST_P(OptimStateBesidePytorch, GoesThroughUnchanged_R18_R23) {
  const auto [name, original] = GetParam();
  const Golden golden(name);
  run_mesh(2, [&, name = name, original = original](Mesh& mesh) {
    const auto& expected = golden.state_dict(original);
    // The two files have the same values for either way of sharding.
    for (const bool from_original : kBoth) {
      const auto& theirs = golden.state_dict(from_original);
      for (const int way : {0, 1, 2}) {
        auto peer = make_peer(name, golden.tree.at("weights"), mesh, original);
        const OptimTarget target{.optim = OptimizerRef(*peer.optim)};
        const auto loaded =
            way == 0 ? shard_full_optim_state_dict(theirs, peer.module, target)
            : way == 1
                ? scatter_full_optim_state_dict(
                      mesh.rank() == 0 ? std::optional(theirs) : std::nullopt, peer.module, target)
                : optim_state_dict_to_load(peer.module, *peer.optim, theirs);
        load_optimizer_state_dict(*peer.optim, loaded);
        const auto saved = full_optim_state_dict(peer.module, *peer.optim, {.rank0_only = false});
        EXPECT_TRUE(same(saved, expected)) << "way " << way;
        expect_same_order(saved, expected, "");
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, OptimStateBesidePytorch,
                         ::testing::Combine(::testing::Values<std::string>("nested", "dummy",
                                                                           "transformer"),
                                            ::testing::Bool()),
                         [](const auto& of) {
                           return std::string(std::get<0>(of.param)) +
                                  (std::get<1>(of.param) ? "_original" : "_flat");
                         });

// Fewer than PyTorch's in its traces of this model (spec 9): 14 and 19 to save, 18 to load chunks.
TEST(OptimStateLayout, NeedsFewerCollectivesThanPytorch_9) {
  for (const bool use_orig_params : {false, true}) {
    std::vector<testing::Counts> of_ranks(2);
    run_mesh(2, [&](Mesh& mesh) {
      auto& counts = of_ranks[mesh.rank()];
      testing::count(mesh, counts);
      NestedModel model;
      wrap_nested(model, mesh, {.use_orig_params = use_orig_params});
      torch::optim::Adam optimizer(local_tensors(sharded_parameters(model)));
      model(torch::ones({8, 5})).sum().backward();
      optimizer.step();
      counts = {};
      (void)full_optim_state_dict(model, optimizer);
      EXPECT_EQ(counts, (testing::Counts{.exchanges = 12, .messages = 1}));
      const auto chunks = sharded_optim_state_dict(model, optimizer);
      counts = {};
      (void)flatten_sharded_optim_state_dict(chunks, model, optimizer);
      EXPECT_LE(counts.messages + counts.exchanges, 18);
      EXPECT_GT(counts.exchanges, 0);
    });
  }
}

}  // namespace
}  // namespace tessera::testing
