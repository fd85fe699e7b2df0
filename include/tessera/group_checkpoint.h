// GroupCheckpoint: a checkpoint that the ranks of a group open together, look into, and load from.
//
//   run_ranks(2, [](Group& group) {
//     auto checkpoint = GroupCheckpoint::open("run/step100", {}, group);
//     Value tree = Value::dict();
//     for (const Leaf& leaf : checkpoint.contents().leaves)
//       if (leaf.name.starts_with("config.")) tree.set_item(leaf.name, Value());
//     checkpoint.load(tree);
//   });
//
// load() of checkpoint.h does both at once. All ranks see and load one save, even if the checkpoint
// is replaced meanwhile.
#pragma once

#include <functional>
#include <memory>

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

class GroupCheckpoint {
 public:
  // Rank 0 alone looks into the store. `group` must outlive the result. Throws on all ranks what
  // Checkpoint::open throws. Collective.
  [[nodiscard]] static GroupCheckpoint open(const Location& where, const LoadOptions& options,
                                            Group& group);

  // The same for ranks that will load `model`, a dict of names and tensors with each rank's pieces,
  // and its optimizer's state. Where every rank has saved just these pieces itself, as olmo-local
  // or olmo-legacy on as many ranks, each opens its own files and no other: then contents() has the
  // leaves of these files alone, without the trainer's state (trainer_state.h), and is_own() is
  // true. Every checksum of what load() reads is compared then. Throws `mismatch` on all ranks when
  // the files of two ranks are not of one save. Of olmo-legacy each needs no more than a file of
  // its own: where rank 0 does not see those of the others, ranks tell one another what theirs
  // hold, and is_own() is false.
  [[nodiscard]] static GroupCheckpoint open(const Location& where, const Value& model,
                                            const LoadOptions& options, Group& group);
  [[nodiscard]] bool is_own() const;

  // The leaves: names, paths, values, and tensors with dtype and shape. Tensors may lack their
  // pieces, so nothing but load() reads them. The same on every rank, unless is_own(). A copy must
  // not outlive this.
  [[nodiscard]] const Checkpoint& contents() const&;

  // Shows other leaves from now on, to contents() and to load(). `fn` gets the contents and returns
  // them with other leaves: tensors of theirs under other names, also one under several, and any
  // values. So do Checkpoint::map and as_training_state() of restore.h. All ranks must make the
  // same names: else it throws `mismatch`. Collective.
  void arrange(const std::function<Checkpoint(const Checkpoint& contents)>& fn);

  // Loads as load() of checkpoint.h does, with the reader that opened it. Any number of times.
  // Collective.
  LoadReport load(Value& tree, const LoadOptions& options = {});

  GroupCheckpoint(GroupCheckpoint&&) noexcept;
  GroupCheckpoint& operator=(GroupCheckpoint&&) noexcept;
  ~GroupCheckpoint();

 private:
  struct Opened;
  explicit GroupCheckpoint(std::unique_ptr<Opened> opened);
  std::unique_ptr<Opened> opened_;
};

}  // namespace tessera
