// ShardChanges: whether a shard still holds what was gathered from it.
#pragma once

#include <cstdint>
#include <optional>

#include "fsdp/unit/param_store.h"

namespace tessera::detail {

class ShardChanges {
 public:
  // `store` outlives this; null: there is no shard, and nothing ever changes.
  explicit ShardChanges(const ParamStore* store) : store_(store) {}

  // Another number after every operation on the shard that autograd knows of (an optimizer's step).
  [[nodiscard]] std::uint32_t version() const;
  // The shard is being gathered as it is now.
  void note_gather();
  // Somebody may write to the shard's memory past libtorch.
  void hand_out() noexcept { handed_out_ = true; }
  // The shard may have changed since it was gathered: by an operator, or its memory was handed out.
  [[nodiscard]] bool is_stale() const { return handed_out_ || version() != gathered_version_; }
  // Keeps a digest of what the shard holds until it is gathered again: torch::optim::SGD changes it
  // through data(), which leaves no version behind. A shard elsewhere is copied to the CPU for it.
  void remember();
  // On this rank, since it was remembered.
  [[nodiscard]] bool has_changed() const;

 private:
  const ParamStore* store_;
  bool handed_out_ = false;
  std::uint32_t gathered_version_ = 0;       // when it was last gathered
  std::optional<std::uint64_t> remembered_;  // digest of the shard
};

}  // namespace tessera::detail
