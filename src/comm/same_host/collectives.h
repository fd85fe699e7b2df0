// The collectives as calls of an Exchange, over plain memory.
//
// Arrays longer than a slot go in slices of a round each. A function says what is to be done,
// Exchange::start does it. `name` has to tell everything that must be equal, sizes included; an
// `owner` is for the caller to set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/same_host/exchange.h"
#include "comm/same_host/reduce.h"
#include "tessera/dtype.h"

namespace tessera::same_host {

// How an array of `bytes` is cut into rounds of at most `most`.
struct Slices {
  std::size_t bytes;
  std::size_t most;

  // An empty array takes a round too: whoever calls it meets the others.
  [[nodiscard]] std::int64_t rounds() const noexcept {
    return bytes == 0 ? 1 : static_cast<std::int64_t>((bytes + most - 1) / most);
  }
  [[nodiscard]] std::size_t begin(std::int64_t round) const noexcept {
    return static_cast<std::size_t>(round) * most;
  }
  [[nodiscard]] std::size_t size(std::int64_t round) const noexcept {
    return std::min(most, bytes - begin(round));
  }
};
// Each round a slot, or a slot in equal parts for each rank.
[[nodiscard]] Slices whole_slots(const Exchange& exchange, std::size_t bytes);
[[nodiscard]] Slices shared_slots(const Exchange& exchange, std::size_t bytes);

// Every rank waits for every other.
[[nodiscard]] Call barrier_call();

// `bytes` from each rank; `outs`: where those of each rank go, on `root` or, for kEveryone, on all;
// empty elsewhere. `in` may be one of them.
struct GatherArguments {
  const std::byte* in;
  std::vector<std::byte*> outs;
  std::size_t bytes;
  int root;
};
[[nodiscard]] Call gather_call(const Exchange& exchange, std::string name, GatherArguments args);

// `bytes` for each rank; `ins`: those for each rank, on `root`; empty elsewhere.
struct ScatterArguments {
  std::vector<const std::byte*> ins;
  std::byte* out;
  std::size_t bytes;
  int root;
};
[[nodiscard]] Call scatter_call(const Exchange& exchange, std::string name, ScatterArguments args);

// `data`: sent by `root`, filled elsewhere.
struct BroadcastArguments {
  std::byte* data;
  std::size_t bytes;
  int root;
};
[[nodiscard]] Call broadcast_call(const Exchange& exchange, std::string name,
                                  const BroadcastArguments& args);

// What reduce() takes. all_reduce: `elements` in all, `in` may be `out`. reduce_scatter: `elements`
// for each rank, `ins`: this rank's for each rank; `out` may be this rank's own of them.
struct ReduceArguments {
  DType dtype;
  Reduction reduction;
  std::byte* out;
  std::size_t elements;
};
[[nodiscard]] Call all_reduce_call(const Exchange& exchange, std::string name, const std::byte* in,
                                   const ReduceArguments& args);
[[nodiscard]] Call reduce_scatter_call(const Exchange& exchange, std::string name,
                                       std::vector<const std::byte*> ins,
                                       const ReduceArguments& args);

}  // namespace tessera::same_host
