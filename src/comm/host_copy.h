// Bytes that rank 0 makes and every rank reads, in the memory of each host once.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "comm/segment.h"
#include "tessera/comm.h"
#include "tessera/io.h"

namespace tessera {

class HostCopy {
 public:
  HostCopy() = default;
  explicit HostCopy(Bytes own) : own_(std::move(own)) {}
  explicit HostCopy(same_host::Segment shared) : shared_(std::move(shared)) {}

  // Stays where it is when the copy is moved. Nobody may write to it.
  [[nodiscard]] ByteView bytes() const noexcept {
    return shared_ ? ByteView(shared_->data(), shared_->size()) : ByteView(own_);
  }
  // Whether other ranks of this host may read the same memory.
  [[nodiscard]] bool is_shared() const noexcept { return shared_.has_value(); }

 private:
  Bytes own_;
  std::optional<same_host::Segment> shared_;
};

struct HostCopyOptions {
  std::size_t small = 1 << 20;   // bytes up to which every rank has a copy of its own
  std::size_t window = 1 << 20;  // bytes that travel at once
};

// Each rank runs `begin`; if it succeeds everywhere, rank 0 runs `make`, and all ranks get the
// result. What either throws reaches every rank as with agree(). A host's lowest rank keeps large
// bytes in memory that the others of the host map; where that is not possible (no /proc, another
// namespace of processes, no room), ranks have copies of their own. Collective: one fold and one
// spread, and for large bytes three more and a spread for each window.
[[nodiscard]] HostCopy copy_to_hosts(Group& group, const std::string& operation,
                                     const std::function<void()>& begin,
                                     const std::function<Bytes()>& make,
                                     const HostCopyOptions& options = {});

}  // namespace tessera
