#include "checkpointer/flat_units.h"

#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/errors.h"
#include "format/olmo/flat_param.h"
#include "fsdp/unit/registry.h"
#include "optim_state/testing.h"
#include "tessera/error.h"
#include "torch/testing.h"

namespace tessera {

// What files of the kind olmo_local say of flat parameters is how the live ones lie.

namespace {

using detail::flat_model_of;
using olmo::FlatGeometry;
using testing::Block;
using testing::BlockImpl;
using ::testing::ElementsAre;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::Way;

void wrap(Net& net, const Mesh& mesh, bool orig_params, const MixedPrecision& precision = {}) {
  const FullyShardedDataParallel<Net> model(net, mesh,
                                            {.auto_wrap_policy = module_wrap_policy<BlockImpl>(),
                                             .mixed_precision = precision,
                                             .use_orig_params = orig_params});
}

std::vector<Shape> shapes_of(const detail::Unit& unit) {
  std::vector<Shape> shapes;
  for (const auto& param : unit.params()) shapes.push_back(param.full.sizes().vec());
  return shapes;
}

using Segments = std::vector<FlatGeometry::Segment>;

Segments live_segments(const UnitLayout& layout, int rank) {
  Segments live;
  for (const auto& run : layout.runs[rank])
    live.push_back({run.param, run.global, run.count, run.local});
  return live;
}

Segments without_padding(Segments segments) {
  std::erase_if(segments, [](const auto& one) { return one.param == FlatGeometry::kPadding; });
  return segments;
}

// (orig_params, type that forwards compute in)
class LiveFlatUnits : public ::testing::TestWithParam<std::tuple<bool, torch::Dtype>> {};

TEST_P(LiveFlatUnits, LieAsTheFilesOfLocalSay_O70) {
  const auto [orig_params, computes] = GetParam();
  for (int world = 1; world <= 4; ++world) {
    SCOPED_TRACE(world);
    run_mesh(world, [&, orig_params = orig_params, computes = computes](Mesh& mesh) {
      auto net = make_net({});
      wrap(net, mesh, orig_params, {.param_dtype = computes, .cast_forward_inputs = false});
      const auto flat = flat_model_of(net);
      EXPECT_EQ(flat.layout.orig_params, orig_params);
      EXPECT_EQ(flat.shards, world);
      const auto live = detail::units_below(*net);
      ASSERT_EQ(flat.layout.units.size(), live.size());
      for (std::size_t u = 0; u < live.size(); ++u) {
        EXPECT_EQ(flat.layout.units[u].path, live[u].first);
        if (world == 1) continue;  // not sharded: there is no layout
        const auto& layout = live[u].second->layout();
        const FlatGeometry said(shapes_of(*live[u].second), *flat.layout.aligned_as, flat.shards,
                                flat.layout.orig_params);
        EXPECT_EQ(said.shard_size(), layout.shard_elements) << u;
        for (int rank = 0; rank < world; ++rank)
          EXPECT_EQ(without_padding(said.shard(rank)), live_segments(layout, rank)) << u;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, LiveFlatUnits,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(torch::kFloat, torch::kBFloat16)),
                         [](const auto& of) {
                           return std::string(std::get<0>(of.param) ? "Original" : "Flat") +
                                  (std::get<1>(of.param) == torch::kFloat ? "Float" : "BFloat16");
                         });

TEST(FlatUnits, ListTheParametersOfEachUnitOnce) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({.tied = true, .blocks = 1});
    wrap(net, mesh, true);
    const auto flat = flat_model_of(net);
    ASSERT_EQ(flat.layout.units.size(), 2U);
    EXPECT_THAT(flat.layout.units[0].names, ElementsAre("embed.weight"));  // the head's is the same
    EXPECT_EQ(flat.layout.units[1].path, "block0");
    EXPECT_THAT(flat.layout.units[1].names,
                ElementsAre("block0.norm.weight", "block0.norm.bias", "block0.up.weight",
                            "block0.up.bias", "block0.down.weight", "block0.down.bias"));
  });
}

TEST(FlatUnits, OfHybridMeshesAreSharedByTheRanksOfACopy) {
  run_mesh(4, [](Mesh& mesh) {
    auto net = make_net({});
    const FullyShardedDataParallel<Net> model(
        net, mesh.split(2),
        {.sharding_strategy = ShardingStrategy::hybrid_shard, .use_orig_params = true});
    EXPECT_EQ(flat_model_of(net).shards, 2);
  });
}

TEST(FlatUnits, OfOtherModelsAreRefused_O73) {
  const auto refusal = [](Net& net) { return error_of([&] { (void)flat_model_of(net); }); };
  run_mesh(2, [&](Mesh& mesh) {
    for (const auto way : {Way::whole, Way::replicated, Way::rows, Way::mixed, Way::aligned}) {
      auto net = make_net({});
      shard(net, way, mesh);
      const auto error = refusal(net);
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << testing::name_of(way);
      EXPECT_THAT(error.message(), ::testing::HasSubstr("`torch_legacy`"));
    }
    auto inner = make_net({});  // whose root is no unit
    for (auto& block : inner->blocks) FullyShardedDataParallel<Block>(block, mesh);
    EXPECT_EQ(refusal(inner).code(), ErrorCode::unsupported);
    auto buffered = make_net({});
    wrap(buffered, mesh, true);
    buffered->register_buffer("count", torch::zeros(1));
    EXPECT_EQ(refusal(buffered).key(), "count");
  });
}

TEST(WrappedNames, AreThoseOfPythonsFsdp) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    EXPECT_EQ(detail::WrappedNames(net).of("block0.up.weight"), "block0.up.weight");
    wrap(net, mesh, true);
    const detail::WrappedNames names(net);
    EXPECT_EQ(names.of("block0.up.weight"),
              "_fsdp_wrapped_module.block0._fsdp_wrapped_module.up.weight");
    EXPECT_EQ(names.of("embed.weight"), "_fsdp_wrapped_module.embed.weight");
    auto rows = make_net({});
    shard(rows, Way::rows, mesh);
    EXPECT_EQ(detail::WrappedNames(rows).of("block0.up.weight"), "block0.up.weight");
  });
}

}  // namespace
}  // namespace tessera
