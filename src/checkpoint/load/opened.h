// A store that waits for what another rank sees.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "checkpoint/open/opened_dcp.h"
#include "comm/host_copy.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// `store`, for objects that rank 0 has found: one that is not there is opened again and again, for
// 90 seconds in all, because a network file system may show it late (fault-rows F24). Opening asks
// the server, where listing may answer from a cache. After that it is `incomplete`, and nothing is
// waited for any more. `is_replaced` says that another checkpoint is there: then what is not there
// is `not_found` at once.
[[nodiscard]] std::shared_ptr<Store> patient_store(std::shared_ptr<Store> store,
                                                   std::stop_token stop,
                                                   std::function<bool()> is_replaced);

// Why a checkpoint is not all there: its files may lie on the disks of several nodes.

// On all ranks, which have got `error` together: throws it on all, and where that is `incomplete`
// and other ranks see files of an olmo-local or olmo-legacy checkpoint that rank 0 does not, says
// who has which, and what can be done. Collective.
[[noreturn]] void rethrow_with_disks(const Error& error, const Location& where, Group& group);

// The checkpoint that a load takes from.

// It is one of five:
//   - every rank has opened it, if not before, then from what rank 0 found: its tensors have their
//     pieces;
//   - rank 0 has opened it for all, and each rank gives the tensors that it wants the pieces that
//     it needs;
//   - every rank has opened its own files of it, and has no pieces of others (own_files.h);
//   - rank 0 alone reads it and tells the others (checkpoint-rows P-19): no tensor has pieces;
//   - every rank has opened its own files of it, which hold other pieces than it wants: it tells
//     the others.
class LoadSource {
 public:
  // `checkpoint` must outlive it.
  explicit LoadSource(const Checkpoint& checkpoint) : whole_(&checkpoint) {}
  // `record`: what `own` was opened from, or nothing of use.
  LoadSource(HostCopy record, std::unique_ptr<Checkpoint> own);
  LoadSource(HostCopy catalog, std::shared_ptr<Store> store);
  // `own`: of this rank's own files.
  explicit LoadSource(std::unique_ptr<Checkpoint> own);
  // `own`: what rank 0 reads; null elsewhere.
  LoadSource(HostCopy catalog, const std::string& path, std::unique_ptr<Checkpoint> own);
  // `own`: what each rank reads; `catalog` is of that.
  LoadSource(HostCopy catalog, std::shared_ptr<Store> store, std::unique_ptr<Checkpoint> own);

  // With the leaves of arrange(), if that was called.
  [[nodiscard]] const Checkpoint& checkpoint() const { return shown_ ? *shown_ : stored(); }
  [[nodiscard]] const Checkpoint& stored() const { return whole_ ? *whole_ : parts_->checkpoint(); }

  // Shows this in place of what is stored. Its tensors are nodes of stored leaves.
  void arrange(Checkpoint shown);
  // Of leaves of checkpoint(), those of stored() that they are nodes of.
  [[nodiscard]] std::vector<bool> stored_leaves(const std::vector<bool>& shown) const;

  // Whether this rank's own files are all that it sees. Other ranks' leaves may differ.
  [[nodiscard]] bool is_own() const noexcept { return is_own_; }
  // Whether ranks are told what they want; `from` is what this rank reads, and null if it does not.
  [[nodiscard]] bool is_told() const noexcept { return is_told_; }
  [[nodiscard]] bool is_told_by_all() const noexcept { return is_told_by_all_; }
  [[nodiscard]] const Checkpoint* from() const noexcept { return own_.get(); }

  // The leaf's tensor is wanted in these pieces, or all of the leaf. Any number of times. Throws
  // `unsupported` for a value that cannot be told.
  void want(std::size_t shown, const Tensor& pieces);
  void want(std::size_t shown);
  // Throws `conflict` if this rank does not find what the pieces need.
  void require_files(int threads) const;
  // Another save may take the place of an OLMo directory before a rank has opened its files there.
  void watch(std::shared_ptr<const Store> directory, std::uint64_t mark);
  // Throws `conflict` if that has happened.
  void require_same_save() const;

 private:
  enum class Wanted : std::uint8_t { nothing, pieces, all };
  void want_told(std::size_t leaf);
  // The stored leaf that a leaf of checkpoint() is; none: a value that arrange() brought.
  [[nodiscard]] std::optional<std::size_t> stored_leaf(std::size_t leaf) const;

  HostCopy catalog_;
  std::unique_ptr<Checkpoint> own_;
  const Checkpoint* whole_ = nullptr;
  std::unique_ptr<OpenedDcp> parts_;                // null: `whole_` is there
  std::vector<Wanted> wanted_;                      // by stored leaf
  std::unique_ptr<const Checkpoint> shown_;         // null: what is stored
  std::vector<std::optional<std::size_t>> origin_;  // by leaf of shown_
  std::shared_ptr<const Store> watched_;            // null: nothing tells
  std::uint64_t mark_ = 0;                          // of the save (read/side_file.h)
  bool is_told_ = false;
  bool is_told_by_all_ = false;
  bool is_own_ = false;
};

// Opens the checkpoint of a load. Rank 0 alone asks the store; from what it found the other ranks
// open it, too. Collective.
[[nodiscard]] LoadSource open_for_load(const Location& where, const LoadOptions& options,
                                       Group& group);
// The same for ranks that will load `model`: of their own files, where each has all that it needs,
// or where all together have and rank 0 does not see the others' (each on a disk of its own).
[[nodiscard]] LoadSource open_own_or_all(const Location& where, const Value& model,
                                         const LoadOptions& options, Group& group);

}  // namespace tessera
