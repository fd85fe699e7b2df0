// ParamStore: the memory of a unit's parameters, as shards and gathered.
//
// The module's own tensors are permanent views of one storage, made once, so that autograd's
// accumulators and saved tensors never go stale. Freeing takes the storage's memory away and marks
// the storage so that any access throws; gathering gives it memory again. What the rank keeps is
// the shard of the channel, of which every `local` is a view. FSDP1 and FSDP2 differ in the layout
// only.
//
// It keeps no state of its own: whether the memory is there is the Unit's to know.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/storage_pool.h"
#include "fsdp/unit_layout.h"
#include "torch/transport.h"

namespace tessera::detail {

class ParamStore {
 public:
  // Takes over `parameters`, whole and of the same shapes on every rank, which become views of the
  // gathered array in dtype `compute`. Collective.
  ParamStore(UnitLayout layout, int rank, Transport& transport, torch::Device device,
             at::ScalarType compute, const std::vector<at::Tensor>& parameters);

  [[nodiscard]] const UnitLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] Channel& channel() const { return *channel_; }
  [[nodiscard]] const at::Tensor& shard() const { return channel_->shard(); }
  // This rank's part of a parameter, a view of the shard without history.
  [[nodiscard]] at::Tensor local(std::size_t param) const;

  // The module's own tensor: a view of the gathered array.
  [[nodiscard]] at::Tensor full(std::size_t param) const;

  void start_gather() { channel_->start_gather(); }
  void finish_gather(StoragePool& pool);
  void drop_gather();
  void free(StoragePool& pool);
  // What an access says while the parameters are not there.
  void forbid_access(const std::string& text);
  [[nodiscard]] bool has_memory() const;
  [[nodiscard]] std::uint64_t gathered_bytes() const;

 private:
  UnitLayout layout_;
  int rank_;
  std::unique_ptr<Channel> channel_;
  at::Tensor gathered_;  // one-dimensional; memory only while gathered
};

}  // namespace tessera::detail
