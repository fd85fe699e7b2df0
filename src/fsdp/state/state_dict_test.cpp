#include "fsdp/state/state_dict.h"
#include "base/testing.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {

// Kinds of model state: full, local, sharded (spec 6.11).

namespace {

namespace nn = torch::nn;
using testing::BlockImpl;
using testing::error_of;
using ::testing::HasSubstr;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

Net wrapped(const Mesh& mesh, bool original,
            ShardingStrategy strategy = ShardingStrategy::full_shard) {
  return FullyShardedDataParallel<Net>(make_net({}), mesh,
                                       {.sharding_strategy = strategy,
                                        .auto_wrap_policy = module_wrap_policy<BlockImpl>(),
                                        .use_orig_params = original})
      .module();
}

void zero(Net& net) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : sharded_parameters(net)) parameter.local.detach().zero_();
}

TEST(StateDict, IsFullUnlessChosenAndGoesBack_E6_M7_M8_SD3_O18) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = wrapped(mesh, false);
    EXPECT_EQ(get_state_dict_type(net), StateDictOptions{});
    {
      const StateDictTypeScope local(net, {.type = StateDictType::local});
      EXPECT_EQ(get_state_dict_type(net).type, StateDictType::local);
      try {
        const StateDictTypeScope sharded(net->blocks[0], {.type = StateDictType::sharded});
        EXPECT_THAT(error_of([&] { static_cast<void>(state_dict(net)); }),
                    HasSubstr("All FSDP module should the same state_dict_type"));
        throw std::runtime_error("in between");
      } catch (const std::runtime_error&) {
      }
      EXPECT_EQ(get_state_dict_type(net).type, StateDictType::local);
    }
    EXPECT_EQ(get_state_dict_type(net).type, StateDictType::full);
    set_state_dict_type(net, {.offload_to_cpu = true});
    set_state_dict_type(net->blocks[0], {.rank0_only = true});
    EXPECT_THAT(error_of([&] { static_cast<void>(get_state_dict_type(net)); }),
                HasSubstr("same type of state_dict_config"));
    EXPECT_THAT(error_of([&] {
                  set_state_dict_type(net, {.type = StateDictType::local, .rank0_only = true});
                }),
                HasSubstr("rank0_only"));
  });
}

TEST(StateDict, OfEveryKindLoadsWhatItSaved_M9_M10_M11_SDT) {
  for (const int world : {2, 3, 4}) {
    for (const bool original : {false, true}) {
      run_mesh(world, [&](Mesh& mesh) {
        auto net = wrapped(mesh, original);
        const auto before = full_state_dict(net);
        for (const auto type :
             {StateDictType::full, StateDictType::local, StateDictType::sharded}) {
          set_state_dict_type(net, {.type = type});
          // The memory of local and sharded states is the shards' own.
          auto other = wrapped(mesh, original);
          set_state_dict_type(other, {.type = type});
          const auto state = state_dict(other);
          zero(net);
          EXPECT_EQ(full_state_dict(net)["block0.up.weight"].abs().sum().item<float>(), 0);
          load_state_dict(net, state);
          for (const auto& entry : full_state_dict(net)) {
            EXPECT_TRUE(testing::equal(entry.value(), before[entry.key()]))
                << entry.key() << " of kind " << static_cast<int>(type);
          }
        }
      });
    }
  }
}

TEST(StateDict, OfTheFullKindIsTheModules_O10_SDT) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = wrapped(mesh, true);
    const auto plain = make_net({});
    set_state_dict_type(net, {.rank0_only = true});
    const auto state = state_dict(net);
    if (mesh.rank() != 0) {
      EXPECT_TRUE(state.pairs().empty());
      return;
    }
    for (const auto& entry : plain->named_parameters()) {
      const auto* leaf = state.find(entry.key());
      ASSERT_NE(leaf, nullptr) << entry.key();
      EXPECT_TRUE(testing::equal(tensor_of(leaf->as_tensor()), entry.value().detach()));
    }
  });
}

TEST(StateDict, OfTheLocalKindIsTheFlatParameterWithoutPadding_SDT) {
  run_mesh(4, [](Mesh& mesh) {
    nn::Linear linear(2, 2);
    auto model = FullyShardedDataParallel<nn::Linear>(linear, mesh);
    const StateDictTypeScope local(model.module(), {.type = StateDictType::local});
    const auto state = state_dict(model.module());
    ASSERT_EQ(state.pairs().size(), 1u);
    const auto& leaf = state.at("_flat_param").as_tensor();
    EXPECT_EQ(leaf.shape, (Shape{6}));  // 2, 2, 2 and nothing
    EXPECT_EQ(leaf.pieces.size(), mesh.rank() == 3 ? 0u : 1u);
    if (mesh.rank() == 3) return;
    const auto& box = std::get<Box>(leaf.pieces[0].slice);
    EXPECT_EQ(box.offsets, (Shape{2 * mesh.rank()}));
    EXPECT_EQ(box.sizes, (Shape{2}));
  });
}

TEST(StateDict, ThatDoesNotFitChangesNothing_X48_X51_X53) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = wrapped(mesh, false);
    auto rows = make_net({});
    testing::shard(rows, mesh);
    set_state_dict_type(rows, {.type = StateDictType::local});
    EXPECT_THAT(error_of([&] { static_cast<void>(state_dict(rows)); }),
                HasSubstr("can only be called when parameters are flatten and sharded"));
    set_state_dict_type(rows, {.type = StateDictType::sharded});
    set_state_dict_type(net, {.type = StateDictType::sharded});
    const auto before = full_state_dict(net);
    // Chunks of columns are not chunks of rows. Rank 1's alone: both ranks refuse.
    auto columns = state_dict(net).pairs();
    if (mesh.rank() == 1) {
      auto leaf = columns.back().second.as_tensor();
      std::get<Box>(leaf.pieces[0].slice).offsets[0] -= 1;
      columns.back().second = Value(leaf);
    }
    EXPECT_THAT(error_of([&] { load_state_dict(net, Value::dict(columns)); }),
                HasSubstr("load it through a checkpoint"));
    auto pairs = state_dict(net).pairs();
    pairs.pop_back();
    EXPECT_THAT(error_of([&] { load_state_dict(net, Value::dict(pairs)); }),
                HasSubstr("lacks this name"));
    pairs = state_dict(net).pairs();
    pairs.emplace_back("more", pairs.back().second);
    EXPECT_THAT(error_of([&] { load_state_dict(net, Value::dict(pairs)); }),
                HasSubstr("the module lacks this name"));
    for (const auto& entry : full_state_dict(net))
      EXPECT_TRUE(testing::equal(entry.value(), before[entry.key()])) << entry.key();
  });
}

TEST(StateDict, OfWhatIsNotShardedIsFullWithAWarning_SDT) {
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(1, [](Mesh& mesh) {
      auto net = wrapped(mesh, false, ShardingStrategy::no_shard);
      const StateDictTypeScope sharded(net, {.type = StateDictType::sharded});
      EXPECT_FALSE(state_dict(net).at("head.weight").as_tensor().sharded);
    });
  });
  EXPECT_THAT(warnings.back(), HasSubstr("full_state_dict will be returned"));
}

// What torch.chunk gives, whichever part of the flat parameter a rank holds.
TEST(StateDict, OfTheShardedKindIsChunksOfRows_SDT_SD9) {
  for (const int world : {2, 3, 4}) {
    for (const bool original : {false, true}) {
      run_mesh(world, [&](Mesh& mesh) {
        const auto plain = make_net({});
        auto net = wrapped(mesh, original);
        set_state_dict_type(net, {.type = StateDictType::sharded});
        const auto state = state_dict(net);
        for (const auto& entry : plain->named_parameters()) {
          const auto& leaf = state.at(entry.key()).as_tensor();
          const auto shape = entry.value().sizes().vec();
          EXPECT_EQ(leaf.shape, shape);
          EXPECT_TRUE(leaf.sharded);
          const auto chunks = entry.value().chunk(world, 0);
          const auto all = shard_metadata(shape, world);
          ASSERT_EQ(all.size(), chunks.size());
          for (std::size_t r = 0; r < all.size(); ++r) {
            EXPECT_EQ(all[r].sizes, chunks[r].sizes().vec());
            EXPECT_EQ(all[r].rank, static_cast<int>(r));
          }
          const auto rank = static_cast<std::size_t>(mesh.rank());
          ASSERT_EQ(leaf.pieces.size(), rank < chunks.size() ? 1u : 0u) << entry.key();
          if (leaf.pieces.empty()) continue;
          const auto& box = std::get<Box>(leaf.pieces[0].slice);
          EXPECT_EQ(box.offsets, all[rank].offsets);
          EXPECT_EQ(box.sizes, all[rank].sizes);
          Tensor mine;
          mine.dtype = leaf.dtype;
          mine.shape = box.sizes;
          mine.pieces = leaf.pieces;
          std::get<Box>(mine.pieces[0].slice).offsets.assign(shape.size(), 0);
          EXPECT_TRUE(testing::equal(tensor_of(mine), chunks[rank])) << entry.key();
        }
      });
    }
  }
}

TEST(StateDict, OfTheShardedKindIsTheSameForEveryWayOfSharding_SDT) {
  run_mesh(3, [](Mesh& mesh) {
    auto rows = make_net({});
    testing::shard(rows, mesh);
    set_state_dict_type(rows, {.type = StateDictType::sharded});
    const auto expected = full_state_dict(rows);
    auto original = wrapped(mesh, true), flat = wrapped(mesh, false);
    for (auto* net : {&original, &flat}) {
      set_state_dict_type(*net, {.type = StateDictType::sharded});
      zero(*net);
      load_state_dict(*net, state_dict(rows));
      for (const auto& entry : full_state_dict(*net))
        EXPECT_TRUE(testing::equal(entry.value(), expected[entry.key()])) << entry.key();
    }
  });
}

struct MixtureImpl : nn::Module {
  nn::Linear linear{nullptr};
  nn::BatchNorm1d norm{nullptr};
  torch::Tensor own;
  MixtureImpl() {
    linear = register_module("linear", nn::Linear(3, 4));
    norm = register_module("norm", nn::BatchNorm1d(4));
    own = register_parameter("own", torch::full({2}, 3.0));
  }
  torch::Tensor forward(const torch::Tensor& x) { return norm(linear(x)) * own.sum(); }
};
TESSERA_MODULE(Mixture);

TEST(StateDict, OfTheFullKindHasBuffersAndIgnoredOnesAsCopies_SDT) {
  run_mesh(2, [](Mesh& mesh) {
    Mixture mixture;
    FullyShardedOptions options;
    options.ignored_parameters = {mixture->own};
    FullyShardedDataParallel<Mixture> model(mixture, mesh, options);
    set_state_dict_type(model.module(), {.offload_to_cpu = true});
    const auto state = state_dict(model.module());
    std::vector<std::string> names;
    for (const auto& pair : state.pairs()) names.push_back(pair.first.as_string());
    EXPECT_THAT(names, ::testing::ElementsAre("own", "linear.weight", "linear.bias", "norm.weight",
                                              "norm.bias", "norm.running_mean", "norm.running_var",
                                              "norm.num_batches_tracked"));
    for (const auto& [name, value] : state.pairs()) {
      auto tensor = tensor_of(value.as_tensor());
      EXPECT_TRUE(tensor.is_cpu());
      tensor.fill_(77);
    }
    EXPECT_EQ(mixture->own[0].item<float>(), 3);
    EXPECT_EQ(mixture->norm->running_var[0].item<float>(), 1);
    EXPECT_EQ(full_state_dict(model.module())["norm.weight"][0].item<float>(), 1);
  });
}

TEST(StateDict, OfHybridShardsHasOneSaverACopy_HY8) {
  run_mesh(4, [](Mesh& mesh) {
    FullyShardedDataParallel<Net> model(make_net({}), mesh.split(2),
                                        {.sharding_strategy = ShardingStrategy::hybrid_shard});
    set_state_dict_type(model.module(), {.rank0_only = true});
    EXPECT_EQ(state_dict(model.module()).pairs().empty(), mesh.rank() % 2 != 0);
    set_state_dict_type(model.module(), {.type = StateDictType::sharded});
    const auto state = state_dict(model.module());
    const auto& box = std::get<Box>(state.at("head.weight").as_tensor().pieces[0].slice);
    EXPECT_EQ(box.offsets[0], mesh.rank() % 2 == 0 ? 0 : 6);  // 11 rows over two ranks
  });
}

}  // namespace
}  // namespace tessera
