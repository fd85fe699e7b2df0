// Ranks that load what they have saved themselves, each from its own files alone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format/sharded/sharded.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"

namespace tessera {

// The rank's part of an olmo-local or olmo-legacy checkpoint by its own files, without the
// trainer's state.
struct OwnFiles {
  Checkpoint checkpoint;   // leaves by stored names, whose tensors have the rank's pieces alone
  bool holds_all = false;  // that this rank wants of the model

  // Whether ranks can tell one another what their files hold: these have the same leaves.
  [[nodiscard]] bool can_be_told() const { return checkpoint.kind == CheckpointKind::olmo_legacy; }
  // Whether this rank sees those of all ranks.
  [[nodiscard]] bool sees_all_files() const;
};
// The names of a rank's files in a checkpoint of kind olmo_local or olmo_legacy, with that of the
// trainer's state. Not all of them have to be there.
[[nodiscard]] std::vector<std::string> names_of_own(CheckpointKind kind, int rank);
// The same without a model: all that the rank's files hold of it. `directory` is guarded as
// guard_present() does.
[[nodiscard]] std::optional<Checkpoint> read_own_files(std::shared_ptr<Store> directory,
                                                       const sharded::Rank& rank);
// The lowest rank of whose files the directory has one; none: of no rank of so many.
[[nodiscard]] std::optional<int> lowest_rank_in(const Store& directory, int world);

// None: there is no such checkpoint, or it is of other ranks. `model`: name -> tensor. Throws what
// is wrong with the rank's files.
[[nodiscard]] std::optional<OwnFiles> open_own_files(const Location& where, const Value& model,
                                                     const sharded::Rank& rank);

// The part of such a checkpoint that a load takes. The rest is for shared_values().
[[nodiscard]] Checkpoint contents_of(const Checkpoint& own);

// What must be the same in the files of all ranks: digests of values, of tensors that are not
// sharded and of the layout of flat parameters. A message of no checkpoint says that there is none.
[[nodiscard]] Bytes shared_values(const std::optional<OwnFiles>& own);
// The values of both; no checkpoint as soon as one rank has none. Throws `mismatch` for values that
// differ: the files are not of one save. Associative.
[[nodiscard]] Bytes combine_shared_values(const Bytes& left, const Bytes& right);
// What all ranks of a message have: not even files, files, or all the pieces that they want.
enum class Holding : std::uint8_t { nothing, some_rank, files, pieces };
[[nodiscard]] Holding holding_of(const Bytes& message);

// Throws `incomplete` unless `found` holds every element that this rank wants.
void require_held(const Tensor& wanted, const Tensor& found);
// Whether this rank has memory for none of the tensor's elements.
[[nodiscard]] bool wants_nothing(const Tensor& wanted);

}  // namespace tessera
