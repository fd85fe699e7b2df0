// A store that waits for what another rank sees.
#pragma once

#include <cstddef>
#include <cstdint>
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

// Who reads what a load takes.
enum class LoadReaders : std::uint8_t {
  all,       // each rank what it wants
  own,       // each rank what it wants, of which its own files have all (own_files.h)
  first,     // rank 0, which tells the others (checkpoint-rows P-19)
  each_own,  // each rank its own files, which hold other pieces than it wants: it tells the others
};

// The checkpoint that a load takes from. Of a DCP directory each rank gives the tensors that it
// wants the pieces that it needs; of another kind it has all of them, unless it is told.
class LoadSource {
 public:
  // `checkpoint` must outlive it.
  explicit LoadSource(const Checkpoint& checkpoint) : whole_(&checkpoint) {}
  LoadSource(HostCopy catalog, std::shared_ptr<Store> store);
  // `from`: what this rank reads for others; `contents` are the same leaves then, without pieces.
  LoadSource(Checkpoint contents, LoadReaders readers, std::unique_ptr<Checkpoint> from = nullptr);

  // With the leaves of arrange(), if that was called.
  [[nodiscard]] const Checkpoint& checkpoint() const { return shown_ ? *shown_ : stored(); }
  [[nodiscard]] const Checkpoint& stored() const { return parts_ ? parts_->checkpoint() : *whole_; }

  // Shows this in place of what is stored. Its tensors are nodes of stored leaves.
  void arrange(Checkpoint shown);
  // The leaves of stored() that the chosen leaves of checkpoint() are nodes of.
  [[nodiscard]] std::vector<bool> stored_leaves(const std::vector<bool>& shown) const;

  // Whether this rank's own files are all that it sees. Other ranks' leaves may differ.
  [[nodiscard]] bool is_own() const noexcept { return readers_ == LoadReaders::own; }
  // Whether ranks are told what they want; `from` is what this rank reads, and null if it does not.
  [[nodiscard]] bool is_told() const noexcept { return readers_ >= LoadReaders::first; }
  [[nodiscard]] bool is_told_by_all() const noexcept { return readers_ == LoadReaders::each_own; }
  [[nodiscard]] const Checkpoint* from() const noexcept { return from_.get(); }

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

  LoadReaders readers_ = LoadReaders::all;
  HostCopy catalog_;                   // of parts_
  std::unique_ptr<OpenedDcp> parts_;   // null: `whole_` is there
  std::vector<Wanted> wanted_;         // by leaf of parts_
  std::unique_ptr<Checkpoint> owned_;  // null: `whole_` is somebody else's
  const Checkpoint* whole_ = nullptr;
  std::unique_ptr<const Checkpoint> from_;
  std::unique_ptr<const Checkpoint> shown_;         // null: what is stored
  std::vector<std::optional<std::size_t>> origin_;  // by leaf of shown_
  std::shared_ptr<const Store> watched_;            // null: nothing tells
  std::uint64_t mark_ = 0;                          // of the save (read/side_file.h)
};

// Opens the checkpoint of a load. Rank 0 alone asks the store; the other ranks get a catalog of
// what it found. Collective.
[[nodiscard]] LoadSource open_for_load(const Location& where, const LoadOptions& options,
                                       Group& group);
// The same for ranks that will load `model`: of their own files, where each has all that it needs,
// or where all together have and rank 0 does not see the others' (each on a disk of its own).
[[nodiscard]] LoadSource open_own_or_all(const Location& where, const Value& model,
                                         const LoadOptions& options, Group& group);

}  // namespace tessera
