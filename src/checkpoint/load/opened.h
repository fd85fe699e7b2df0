// The checkpoint that a load takes from.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/open/opened_dcp.h"
#include "comm/host_copy.h"
#include "tessera/checkpoint.h"

namespace tessera {

// Either every rank has opened it, and its tensors have their pieces. Or rank 0 has opened it for
// all, and each rank gives the tensors that it wants the pieces that it needs.
class LoadSource {
 public:
  // `checkpoint` must outlive it.
  explicit LoadSource(const Checkpoint& checkpoint) : whole_(&checkpoint) {}
  explicit LoadSource(std::unique_ptr<Checkpoint> checkpoint)
      : own_(std::move(checkpoint)), whole_(own_.get()) {}
  LoadSource(HostCopy catalog, std::shared_ptr<Store> store);

  [[nodiscard]] const Checkpoint& checkpoint() const {
    return whole_ ? *whole_ : parts_->checkpoint();
  }

  // The leaf's tensor is wanted in these pieces, or all of it. Any number of times.
  void want(std::size_t leaf, const Tensor& pieces);
  void want(std::size_t leaf);
  // Throws `conflict` if this rank does not find what the pieces need.
  void require_files() const;

 private:
  enum class Wanted : std::uint8_t { nothing, pieces, all };

  HostCopy catalog_;
  std::unique_ptr<Checkpoint> own_;
  const Checkpoint* whole_ = nullptr;
  std::unique_ptr<OpenedDcp> parts_;  // null: `whole_` is there
  std::vector<Wanted> wanted_;        // by leaf
};

// Opens the checkpoint of a load. Rank 0 alone opens a DCP directory; any other kind is opened by
// every rank, and all compare what they have opened. Collective.
[[nodiscard]] LoadSource open_for_load(const Location& where, const LoadOptions& options,
                                       Group& group);

}  // namespace tessera
