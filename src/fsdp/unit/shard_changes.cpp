#include "fsdp/unit/shard_changes.h"

#include <torch/torch.h>

#include "base/digest.h"

namespace tessera::detail {
namespace {

std::uint64_t digest_of(const at::Tensor& shard) {
  const auto here = shard.detach().cpu();
  return digest64({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()});
}

}  // namespace

std::uint32_t ShardChanges::version() const {
  return store_ ? static_cast<std::uint32_t>(store_->shard()._version()) : 0;
}

void ShardChanges::note_gather() {
  gathered_version_ = version();
  remembered_.reset();
  handed_out_ = false;
}

void ShardChanges::remember() {
  if (store_ && !remembered_) remembered_ = digest_of(store_->shard());
}

bool ShardChanges::has_changed() const {
  return is_stale() || (remembered_ && *remembered_ != digest_of(store_->shard()));
}

}  // namespace tessera::detail
