// Lists in messages.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm.h"
#include "tessera/value.h"

namespace tessera::detail {

// "a, b, c".
[[nodiscard]] inline std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

// Trees of state as messages between ranks: what there is, with the small values themselves.
//
// A tensor with dimensions travels as its dtype, its shape and the boxes of its pieces; a tensor
// without is there with its bytes, as are all tensors inside lists and tuples, which no unit
// shards. Failures travel too: a rank that cannot say what it has says why.

[[nodiscard]] Bytes pack_tree(const Value& tree);
// Tensors of which only the description travelled have pieces without storage. Throws `corrupt` for
// what pack_tree did not make.
[[nodiscard]] Value unpack_tree(const Bytes& message);

// Equal data, NaN being equal to itself (optimizer-rows Q-16); tensors by all their bytes.
[[nodiscard]] bool same_value(const Value& a, const Value& b);

// The results of `describe` on every rank, in rank order. All ranks throw what it throws on some
// (Error::from_peers). One collective.
[[nodiscard]] std::vector<Value> all_trees(Group& group, const char* operation,
                                           const std::function<Value()>& describe);
// The result on rank 0; it is called there alone. One collective.
[[nodiscard]] Value first_tree(Group& group, const char* operation,
                               const std::function<Value()>& describe);

}  // namespace tessera::detail
