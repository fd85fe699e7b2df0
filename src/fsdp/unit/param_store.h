// A few freed blocks of memory, kept for the next unit of the same size: on the CPU fresh memory
// costs a page fault every 4 KiB, which would dominate gathering. On a device a block goes from the
// stream that computes to the one that gathers, which waits for the kernels that used it and for no
// others; from the allocator it would have to wait for all that was queued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/types.h>

#include "fsdp/plan/unit_layout.h"
#include "torch/device.h"
#include "torch/transport.h"

namespace tessera::detail {

class StoragePool {
 public:
  // An array like `array`, which has no memory of its own, with memory. On a device it is for the
  // stream of gathers, or for the current one.
  [[nodiscard]] at::Tensor make_like(const at::Tensor& array);
  // Takes the memory of `storage`. Its nominal size stays: views of it can still be made, so that
  // whoever uses a freed parameter gets as far as the access that explains what is wrong.
  void take(c10::StorageImpl& storage);

  // The stream of gathers to `device`, the same one for all of a pool.
  [[nodiscard]] const SideStream& gathers(at::Device device);
  // Shards may have changed: gathers see what the current stream has done to them.
  void follow_current();
  // The stream that sums over copies begin on, likewise.
  [[nodiscard]] const SideStream& sums(at::Device device);

 private:
  struct Block {
    std::size_t bytes;
    c10::DataPtr memory;
    std::optional<c10::Event> last_use;  // on a device, by the stream that computes
  };
  // The memory of a storage that was taken, for one like `model`; null: there is none.
  [[nodiscard]] c10::DataPtr reuse(const c10::StorageImpl& model);

  static constexpr std::size_t kKept = 2;
  std::vector<Block> blocks_;
  std::optional<SideStream> gathers_, sums_;
};

// ParamStore: the memory of a unit's parameters, as shards and gathered.
//
// The module's own tensors are permanent views of one storage, made once, so that autograd's
// accumulators and saved tensors never go stale. Freeing takes the storage's memory away and marks
// the storage so that any access throws; gathering gives it memory again. What the rank keeps is
// the shard of the channel, of which every `local` is a view. FSDP1 and FSDP2 differ in the layout
// only.
//
// It keeps no state of its own: whether the memory is there is the Unit's to know.

struct ParamStoreOptions {
  int rank = 0;
  Transport* transport = nullptr;
  torch::Device device = torch::kCPU;        // of gathered parameters
  torch::Device shard_device = torch::kCPU;  // of shards; pinned when it is the CPU of another
  at::ScalarType compute = at::kFloat;       // of gathered parameters
};

// Gives a channel in the place of the one that it gets.
using ChannelWrapper = std::function<std::unique_ptr<Channel>(
    std::unique_ptr<Channel> channel, int ranks, const at::TensorOptions& travelling)>;

class ParamStore {
 public:
  // Shards of `parameters`, whole and of the same shapes on every rank. Collective.
  ParamStore(UnitLayout layout, const ParamStoreOptions& options,
             const std::vector<at::Tensor>& parameters);
  ~ParamStore();
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;

  // Makes them views of the gathered array, without memory.
  void take_over(const std::vector<at::Tensor>& parameters);

  [[nodiscard]] const UnitLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] Channel& channel() const { return *channel_; }
  void wrap_channel(const ChannelWrapper& wrap);
  void set_label(const std::string& label);  // of what travels
  [[nodiscard]] const at::Tensor& shard() const { return channel_->shard(); }
  // This rank's part of a parameter, a view of the shard without history.
  [[nodiscard]] at::Tensor local(std::size_t param) const;

  // The module's own tensor: a view of the gathered array.
  [[nodiscard]] at::Tensor full(std::size_t param) const;
  [[nodiscard]] bool owns(const at::Tensor& full) const;  // it is such a view

  // Opens a second home of the parameters, over fewer ranks, laid out as `layout` says. Collective.
  void open_parking(UnitLayout layout, int rank, Transport& transport);
  [[nodiscard]] bool has_parking() const noexcept { return parking_.has_value(); }

  // Gathers come from the shards, or from where the parameters were parked. The parameters are
  // there after finish_gather; the memory for them may be taken earlier. `may_change`: the shard,
  // before then; what is gathered is what it holds now.
  void start_gather(std::shared_ptr<StoragePool> pool, bool may_change);
  void finish_gather();
  void drop_gather(StoragePool& pool);
  void free(StoragePool& pool);
  // Keeps this rank's part of what is gathered, and frees the rest.
  void park(StoragePool& pool);
  void unpark() noexcept { is_parked_ = false; }
  // The text of an access while the parameters are not there.
  void forbid_access(const std::string& text);
  [[nodiscard]] bool has_memory() const;
  [[nodiscard]] torch::Device device() const { return gathered_.device(); }
  [[nodiscard]] std::uint64_t gathered_bytes() const;  // held now
  [[nodiscard]] std::uint64_t whole_bytes() const;     // while gathered

 private:
  struct Parking {
    UnitLayout layout;
    int rank;
    std::unique_ptr<Channel> channel;
  };
  void fill_shard(const std::vector<at::Tensor>& parameters);
  [[nodiscard]] Channel& source() const;
  [[nodiscard]] const UnitLayout& source_layout() const;
  void start_whole_gather(StoragePool& pool, bool may_change);
  void await_gather();
  void take(const UnitLayout& from, int rank, std::int64_t begin, const at::Tensor& part);

  UnitLayout layout_;
  int rank_;
  std::unique_ptr<Channel> channel_;
  std::optional<Parking> parking_;
  bool is_parked_ = false;
  at::Tensor gathered_;  // one-dimensional; memory only while gathered
  at::Tensor filling_;   // the same, filled by a gather under way
  // On a device: what a gather of one array under way ends with, on the stream of gathers.
  std::optional<c10::Event> arrival_;
  // On a device: what parking ended with, on the stream that computes.
  std::optional<c10::Event> parked_;
};

}  // namespace tessera::detail
