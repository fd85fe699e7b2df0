// The ways to shard a model, for tests that hold for several of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace tessera::testing {

// fully_shard makes rows, or a copy on each rank (hybrid); FullyShardedDataParallel makes flat
// parameters or original ones, and of these whole or hybrid ones.
enum class Sharding : std::uint8_t {
  rows,
  hybrid,
  flat,
  original,
  original_whole,
  original_hybrid,
  replicate
};

inline std::string name_of(Sharding kind) {
  constexpr const char* kNames[] = {"Rows",          "Hybrid",         "Flat",     "Original",
                                    "OriginalWhole", "OriginalHybrid", "Replicate"};
  return kNames[static_cast<int>(kind)];
}
inline std::string sharding_name(const ::testing::TestParamInfo<Sharding>& given) {
  return name_of(given.param);
}

// Makes units of `inner`, the modules of these types in `model`, and of `model`. `options` are
// those of fully_shard.
template <typename Model, typename... Inner>
void shard_as(Sharding kind, const ShardOptions& options, const Mesh& mesh, Model& model,
              Inner&... inner) {
  const auto each = [&](const auto& apply) {
    (apply(inner), ...);
    apply(model);
  };
  const auto fsdp1 = [&](ShardingStrategy strategy, bool original, const auto& ranks) {
    FullyShardedOptions wrapping{.sharding_strategy = strategy, .use_orig_params = original};
    if constexpr (sizeof...(Inner) > 0)
      wrapping.auto_wrap_policy = module_wrap_policy<typename Inner::ContainedType...>();
    const FullyShardedDataParallel<Model> wrapped(model, ranks, wrapping);
  };
  switch (kind) {
    case Sharding::rows:
      return each([&](auto& module) { fully_shard(module, mesh, options); });
    case Sharding::hybrid: {
      const auto ranks = mesh.split(1);
      return each([&](auto& module) { fully_shard(module, ranks, options); });
    }
    case Sharding::flat:
      return fsdp1(ShardingStrategy::full_shard, false, mesh);
    case Sharding::original:
      return fsdp1(ShardingStrategy::full_shard, true, mesh);
    case Sharding::original_whole:
      return fsdp1(ShardingStrategy::no_shard, true, mesh);
    case Sharding::original_hybrid:
      return fsdp1(ShardingStrategy::hybrid_shard, true, mesh.split(1));
    case Sharding::replicate:
      return each([&](auto& module) { replicate(module, mesh); });
  }
}

}  // namespace tessera::testing
