// What one rank's load will do, and where its tree and the checkpoint do not fit: decided before it
// touches the tree.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/load/fill.h"
#include "checkpoint/load/opened.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/leaf.h"

namespace tessera {

// The differences between a tree and a checkpoint: all of them, in one list.

class Differences {
 public:
  // `sought`: the checkpoint's key for it, the same unless it was renamed.
  void add_missing(std::string key, std::string sought);
  // `why` is what a load of this key alone would throw.
  void add_unfit(std::string key, const Error& why);
  void set_extra(std::vector<std::string> keys) { extra_ = std::move(keys); }
  // Keys that this tree leaves: one that ends as a missing one does is named beside it.
  void set_left(std::vector<std::string> keys) { left_ = std::move(keys); }
  [[nodiscard]] bool has_missing() const noexcept { return !missing_.empty(); }

  // The error that names all differences that `options` refuses, and what differs in each; none
  // when there are none. After the first hundred they are counted and not named. The code is the
  // one that all of them have (`not_found` for missing keys), else `mismatch`; the key is the first
  // one.
  [[nodiscard]] std::optional<Error> refusal(const LoadOptions& options) const;

  // Puts them into `report`, sorted.
  void fill(LoadReport& report) const;

 private:
  struct Missing {
    std::string key, sought;
  };
  struct Unfit {
    std::string key;
    ErrorCode code;
    std::string reason;
  };

  std::vector<Missing> missing_;
  std::vector<Unfit> unfit_;
  std::vector<std::string> extra_, left_;
};

// Which leaves of a checkpoint no rank has taken: messages of ranks that a fold combines.

// `untaken`: positions in `leaves`, ascending, of those that this rank has not taken. `refused`:
// whether it refuses to load when there are leaves that no rank takes.
[[nodiscard]] Bytes untaken_message(const std::vector<Leaf>& leaves,
                                    const std::vector<std::size_t>& untaken, bool refused);

// The leaves that neither has taken. Associative; see Combine.
[[nodiscard]] Bytes combine_untaken(Bytes left, Bytes right);

// Those of this rank's `untaken` that no rank has taken, by the message of all ranks. Where the
// ranks' checkpoints have other names or another order of leaves, it is this rank's own list.
[[nodiscard]] std::vector<std::size_t> untaken_by_all(const Bytes& message,
                                                      std::vector<std::size_t> untaken);

// Whether the ranks' leaves have other names or another order.
[[nodiscard]] bool names_differ(const Bytes& message);

// Whether one of the ranks refuses.
[[nodiscard]] bool any_refuses(const Bytes& message);

// What one rank's load will do, decided before it touches the tree.

struct LoadPlan {
  std::vector<Filling> fillings;
  Owners owners;                               // of the fillings; found once all of them fit
  std::vector<std::pair<Path, Value>> values;  // to be put into the tree at the end
  Differences differences;                     // missing and unfit keys
  std::vector<std::size_t> untaken;            // leaves of the checkpoint, ascending
};

// Matches the leaves of the tree with those of the checkpoint (checkpoint-rows P-16). Throws only
// for a tree into which nothing could be loaded: one whose memory is not what its pieces say.
// Leaves of the checkpoint that hold nothing (empty dicts) count as taken.
[[nodiscard]] LoadPlan plan_load(const Value& tree, LoadSource& source, const LoadOptions& options);

}  // namespace tessera
