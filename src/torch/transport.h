// Transport: how the ranks of a mesh exchange the shards of units and the sums of gradients.
//
// The runtime talks to this and not to a backend, so that a transport may place shards where peers
// can read them and copy straight into what a gather fills. All ranks open the same channels and
// start and finish the same operations in the same order. Failures are Error `timeout` or
// `peer_failed`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "same_host/same_host.h"
#include "torch/call_names.h"
#include "torch/tensor.h"

namespace tessera {

// The sum of a reduction, the same on all ranks.
struct SliceSum {
  std::int64_t elements = 0;          // of each rank's slice
  at::ScalarType dtype = at::kFloat;  // that they travel and are summed in
  std::int64_t averaged = 0;          // of them, the first: divided by the number of ranks
  std::string what = {};              // they are, for who reads that the ranks differ
};

// The traffic of one unit. At most one gather and one reduction are under way at a time. Nothing is
// left of one whose start or finish has thrown: to finish it once more does nothing, and gives no
// sum.
class Channel {
 public:
  // Called between the start and the end of a gather, until every element of every rank's flat
  // shard was given once: `part` are those from `begin` on, in the dtype they travel or are kept
  // in, gone after the call.
  using Take = std::function<void(int rank, std::int64_t begin, const at::Tensor& part)>;
  // Called between the start and the end of a reduction, once for every element of every rank's
  // slice: writes this rank's gradients of what `rank` holds from `begin` on into `part`. It owns
  // what it reads, and may be called when the channel is gone.
  using Fill = std::function<void(int rank, std::int64_t begin, const at::Tensor& part)>;

  virtual ~Channel() = default;
  Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // The name of whom the traffic serves, the same on all ranks. It travels with every operation,
  // and ranks that do the same for different units get `mismatch`, not each other's numbers. (Only
  // the order of the parameters in the first training pass and the reductions are compared where
  // NCCL carries them: to read a name from the device would cost more than the gather.)
  virtual void set_label(std::string label) { label_ = std::move(label); }

  // This rank's flat shard, one-dimensional, zeros at first. Parameters live in it.
  [[nodiscard]] virtual const at::Tensor& shard() const = 0;

  // What travels is what the shard holds now. Unless it `may_change` before the finish it is not
  // copied: then it may not.
  virtual void start_gather(Take take, bool may_change) = 0;
  // The same, but nothing is handed out: after the finish the shards of all ranks lie one after the
  // other in what `memory` gave, an array of the dtype and device that they travel in. False, and
  // nothing is started: this channel hands out parts, and whoever takes them copies.
  using Memory = std::function<at::Tensor()>;
  [[nodiscard]] virtual bool start_gather_into(const Memory& /*memory*/, bool /*may_change*/) {
    return false;
  }
  virtual void finish_gather() = 0;

  // Whether it moves whole arrays: on a device, where a kernel takes apart what all ranks have
  // sent, and puts together what they get. Then start_gather_into does what it is asked,
  // start_whole_reduce takes the place of start_reduce, and both are queued on the current stream:
  // a finish makes the stream that is current then wait, not the host.
  [[nodiscard]] virtual bool moves_whole() const { return false; }
  // `slices`: what this rank gives to each, one after the other.
  virtual void start_whole_reduce(const SliceSum& sum, const at::Tensor& slices);

  // The tensors that every rank gives, one after the other; of the same shape (one dimension) and
  // dtype on all. Waits.
  [[nodiscard]] virtual at::Tensor exchange(const at::Tensor& mine) = 0;

  virtual void start_reduce(const SliceSum& sum, Fill fill) = 0;
  // The sum over the ranks of the slices meant for this one, in memory of its own.
  [[nodiscard]] virtual at::Tensor finish_reduce() = 0;

 protected:
  // "gather of 12 Float, LABEL"
  [[nodiscard]] std::string name_of(const char* operation, std::int64_t elements,
                                    at::ScalarType type, const std::string& what = {}) const {
    auto name =
        operation + std::string(" of ") + std::to_string(elements) + " " + c10::toString(type);
    if (!what.empty()) name += ", " + what;
    return label_.empty() ? name : name + ", " + label_;
  }

 private:
  std::string label_;
};

inline void Channel::start_whole_reduce(const SliceSum&, const at::Tensor&) {
  throw std::logic_error("a channel that moves no whole arrays");
}

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
  // The same, but it gives the sum divided by the number of ranks. Null, and nothing is started:
  // this transport does not divide on the way.
  [[nodiscard]] virtual std::unique_ptr<PendingSum> start_mean(const at::Tensor& /*values*/) {
    return {};
  }
  // The average of many arrays, in place, and the sum of `flags`, as one operation that matches a
  // start_sum of all of them, end to end, on another rank. Null: this transport wants one array.
  // `parts` and `flags`: contiguous, of one dtype, float or double.
  [[nodiscard]] virtual std::unique_ptr<PendingSum> start_average(
      const std::vector<at::Tensor>& /*parts*/, const at::Tensor& /*flags*/) {
    return {};
  }
};

// One rank alone: nothing travels.
[[nodiscard]] std::unique_ptr<Transport> make_solo_transport();

// Transport by the collectives of a c10d process group (Gloo, NCCL).

// `reductions`: a group of the same ranks for sums; null: `group`.
[[nodiscard]] std::unique_ptr<Transport> make_c10d_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    c10::intrusive_ptr<c10d::ProcessGroup> reductions = {});

// Transport by messages between pairs of ranks, for Gloo: its collectives hand their work to
// threads, its messages do not, and its reduce-scatter moves twice what it has to.
// docs/performance.md has the numbers.

// Null without `names`: unless `group` is Gloo's.
[[nodiscard]] std::unique_ptr<Transport> make_pairwise_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<CallNames> names);

// Transport through the memory that the ranks of one host share: shards and gradients are copied
// from where they are into slots, and from slots to where they are needed; no array in between.

// Null when the ranks of `group` do not share a host.
[[nodiscard]] std::unique_ptr<Transport> make_same_host_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

// The arithmetic of Channel::start_reduce, for transports that add up themselves.

// The name of `type` for same_host::reduce, when slices of it can be added up.
inline std::optional<DType> summable(at::ScalarType type) {
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16)
    return std::nullopt;
  return dtype_of(type);
}

// Dividing right after adding gives the bits of dividing what was rounded to the type.
inline bool divides_at_once(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble;
}

// Elements [begin, begin + part.numel()) of a sum: adds up `sources`, one a rank, in their order,
// into `part`, which may be one of them, and divides what of it is to be averaged, if that can be
// done at once.
inline void add_up(const SliceSum& sum, std::int64_t begin, std::vector<const std::byte*> sources,
                   const at::Tensor& part) {
  const auto dtype = *summable(sum.dtype);
  const auto count = part.numel();
  const auto averaged = divides_at_once(sum.dtype)
                            ? std::clamp<std::int64_t>(sum.averaged - begin, 0, count)
                            : std::int64_t{0};
  auto* out = static_cast<std::byte*>(part.mutable_data_ptr());
  same_host::reduce(dtype, same_host::Reduction::average, sources, out, averaged);
  const auto bytes = static_cast<std::size_t>(averaged) * c10::elementSize(sum.dtype);
  for (auto& source : sources) source += bytes;
  same_host::reduce(dtype, same_host::Reduction::sum, sources, out + bytes, count - averaged);
}

// The rest of the division, when all of `values` is there.
inline void divide_rest(const SliceSum& sum, int ranks, const at::Tensor& values) {
  if (sum.averaged > 0 && !divides_at_once(sum.dtype))
    values.narrow(0, 0, sum.averaged).div_(ranks);
}

}  // namespace tessera
