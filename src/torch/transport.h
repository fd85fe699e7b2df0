// Transport: how the ranks of a mesh exchange the shards of units and the sums of gradients.
//
// The runtime talks to this and not to a backend, so that a transport may place shards where peers
// can read them and copy straight into what a gather fills. All ranks open the same channels and
// start and finish the same operations in the same order. Failures are Error `timeout` or
// `peer_failed`.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace tessera {

// The traffic of one unit. At most one gather and one reduction are under way at a time.
class Channel {
 public:
  // Called by finish_gather once a rank, with that rank's flat shard, in the dtype it travels in.
  using Take = std::function<void(int rank, const at::Tensor& shard)>;
  // Called by start_reduce once a rank, to write into `slice` this rank's gradients of what `rank`
  // holds.
  using Fill = std::function<void(int rank, at::Tensor& slice)>;

  virtual ~Channel() = default;
  Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // This rank's flat shard, one-dimensional, zeros at first. Parameters live in it. It may not
  // change between the start and the finish of a gather.
  [[nodiscard]] virtual const at::Tensor& shard() const = 0;

  virtual void start_gather() = 0;
  virtual void finish_gather(const Take& take) = 0;

  // What every rank gives, one after the other; of the same shape (one dimension) and dtype on all.
  // Waits.
  [[nodiscard]] virtual at::Tensor exchange(const at::Tensor& mine) = 0;

  // `elements`: of each rank's slice, `dtype`: what they travel and are summed in; both the same on
  // all ranks.
  virtual void start_reduce(std::int64_t elements, at::ScalarType dtype, const Fill& fill) = 0;
  // The sum over the ranks of the slices meant for this one, in memory of its own.
  [[nodiscard]] virtual at::Tensor finish_reduce() = 0;
};

// A sum over the ranks that is under way.
class PendingSum {
 public:
  virtual ~PendingSum() = default;
  // Until the tensor that was given holds the sum.
  virtual void finish() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // A channel for flat shards of `elements` elements a rank, which are kept as `shard` says and
  // travel as `travelling` says (dtype and device; casts and copies are the sender's). Sums travel
  // on that device too. Collective.
  [[nodiscard]] virtual std::unique_ptr<Channel> open(std::int64_t elements,
                                                      const at::TensorOptions& shard,
                                                      const at::TensorOptions& travelling) = 0;
  // Starts to add `values`, contiguous and of the same shape and dtype on all ranks, up in place;
  // they may not be touched before the sum is finished.
  [[nodiscard]] virtual std::unique_ptr<PendingSum> start_sum(const at::Tensor& values) = 0;
};

// One rank alone: nothing travels.
[[nodiscard]] std::unique_ptr<Transport> make_solo_transport();

}  // namespace tessera
