// Rank 0's values to all ranks.
#pragma once

#include <cstddef>
#include <vector>

#include <torch/types.h>

#include "fsdp/unit/param_store.h"
#include "tessera/mesh.h"

namespace tessera::detail {

constexpr std::size_t kBroadcastBytes = 250 << 20;  // fsdp-rows K4
// Rank 0's values to all ranks, in messages of about `message_bytes`; what is listed twice goes
// once. Throws `invalid_argument` for a tensor without data. Collective.
void broadcast_from_first(std::vector<at::Tensor> tensors, const Mesh& mesh,
                          std::size_t message_bytes = kBroadcastBytes);

// WholeParameters: all parameters of a unit as one array, outside of the schedule: gathered, viewed
// and cut again (tessera/pytorch/state_dict.h, state dicts).

class WholeParameters {
 public:
  // `store` outlives this.
  explicit WholeParameters(const ParamStore& store) : store_(store) {}

  // The parts that every rank gives, one after the other. Collective.
  [[nodiscard]] at::Tensor exchange(const at::Tensor& mine) const;
  // All parameters out of what every rank gives, laid out as its shard: one-dimensional.
  // Collective.
  [[nodiscard]] at::Tensor gather_of(const at::Tensor& mine, const at::Tensor& memory = {}) const;
  // The same out of the shards themselves. In `memory` of one dimension where it is of their type
  // and large enough.
  [[nodiscard]] at::Tensor gather(const at::Tensor& memory = {}) const;
  // Parameter `param` in what gather() gave.
  [[nodiscard]] at::Tensor view(const at::Tensor& whole, std::size_t param) const;
  // The sums over the ranks of what each gives. Collective.
  [[nodiscard]] at::Tensor sum(const at::Tensor& mine) const;
  // Copies this rank's part of `whole` to `to`, laid out as the shard.
  void keep_own(const at::Tensor& whole, const at::Tensor& to) const;
  // The same from one whole parameter.
  void take_own(std::size_t param, const at::Tensor& whole, const at::Tensor& to) const;

 private:
  const ParamStore& store_;
};

}  // namespace tessera::detail
