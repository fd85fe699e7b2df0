// CheckpointWriter: saves in the background, while a training goes on.
//
//   CheckpointWriter writer;  // once; of several ranks each has a group that nothing else uses
//   const Value tree = Value::dict({{"step", 400}});
//   const PendingSave pending = writer.save(tree, "run/step400");  // copies the tensors
//   ...
//   pending.result();  // waits, throws what failed
//
// save() copies every tensor into an arena, memory that is made and touched once and then used
// again, and returns. A thread of the writer's own then does what save() of checkpoint.h does, from
// these copies and over the writer's group: all of its contract holds, on every kind and store.
// After each save the log has, as a note of each rank, how long save() took, how long the rest, and
// the rank's bytes beside the mean of all.
// docs/design/async.md says who owns the arena when, and what a kill at each moment leaves.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/comm.h"
#include "tessera/location.h"
#include "tessera/save_options.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

class BackgroundWriter;
class SaveOutcome;

// A save that was begun. Copies are handles of the same one; they may outlive the writer. Any
// thread may call any member. In a child of fork() each throws `invalid_argument`: the save is its
// parent's.
class PendingSave {
 public:
  // Whether the arena has the tensors of this rank. If not, it will have them (Overlap), or
  // result() says why it never will.
  [[nodiscard]] bool staged() const;
  // Waits until it has them, or never will. Then what was saved may change.
  void await_staged() const;
  // Whether it is decided: the checkpoint is there, or the save has failed. Does not wait.
  [[nodiscard]] bool done() const;
  // Whether it is decided and has failed. The error stays to be taken.
  [[nodiscard]] bool failed() const;
  // Waits until it is decided. Throws what failed, on every rank the same error with the share of
  // each; every call does. An error that this has thrown counts as taken.
  SaveResult result() const;  // NOLINT(modernize-use-nodiscard): it is also called to wait

 private:
  friend class CheckpointWriter;
  friend class BackgroundWriter;
  explicit PendingSave(std::shared_ptr<SaveOutcome> outcome) : outcome_(std::move(outcome)) {}
  std::shared_ptr<SaveOutcome> outcome_;  // the writer's thread decides it
};

// Hears that a save is decided, on the writer's thread: result() of `save` returns or throws at
// once. The next save begins when it returns, and no save() throws the error of this one before:
// others wait for it, save() among them unless it refuses. result() may have returned before.
// Calls of a writer are `invalid_argument` there, but it may end one. What it throws becomes a
// warning. A save() that throws is not heard of here, and neither is one that is refused at once.
using SaveDone = std::function<void(const PendingSave& save)>;

// What save() does while an earlier save is under way: one at a time has the arena.
enum class IfBusy : std::uint8_t {
  wait,  // until that one is decided and its callback has returned
  // The new one is `limit`, by its result(). To skip it, drop the handle where staged() is false
  // behind await_staged(): nobody throws this `limit` later. One process decides at once, without a
  // callback. Of several ranks one that refuses makes the save of all `limit`, once all have come
  // to it, and a note of the log says so.
  refuse,
};

// Whether a save may return before the arena has those of its tensors that do not change before the
// next step of an optimizer: they are copied while the next forward and backward run. That is
// asked for memory of which the caller says so, as save() of training_writer.h does.
enum class Overlap : std::uint8_t {
  never,
  // The first saves are done both ways, three each, and measured: the time from one step of
  // tessera::AdamW to the next, both by the thread that saves. Later ones take the way that cost
  // less; a note of the log says which. Each rank decides for itself. Once something has changed
  // what was saved before the step that followed, or a save was `conflict` for that, they wait.
  measured,
  always,
};

// Memory that stays as it is after save() has returned, until it is copied.
struct SteadyMemory {
  // Whether the bytes of a storage of the tree are such. Called by save(). Null: none are.
  std::function<bool(const Storage& storage)> has = {};
  // Throws an Error if some were changed after all: the save fails then on all ranks. The thread
  // that called save() is the one that changes them, and it is asked when it comes by once all is
  // copied: by await_staged(), by save() or wait() of the writer, by a member of this save, or by
  // what of Tessera waits. What it changed before, it has changed by then; so nothing is written
  // before that. If it stays away for WriterOptions::ask_within, a thread of the writer asks in its
  // place. This takes no lock that the caller may hold then, and does not open the place that is
  // saved to. With Overlap::measured it is also
  // called where the next step of tessera::AdamW begins, also when the save has ended. Null: nobody
  // can tell, and nothing waits for the caller.
  std::function<void()> require_unchanged = {};
  // Whether all that changes it waits for the copy by itself. If not, Overlap::always has to be
  // asked for.
  bool is_awaited = false;
};

struct WriterOptions {
  // Bytes of the arena, which is made and touched by the constructor; a save that needs more is
  // `limit`. 0: as many as the first save needs, which makes it. A later save that needs more has
  // it made anew, and a note of the log says so: an optimizer may get its state after the first.
  std::uint64_t bytes = 0;
  IfBusy if_busy = IfBusy::wait;
  std::uint64_t rate = 0;  // bytes a second that a save writes from the arena at most; 0: any
  // Threads of the writer run only where a processor has nothing else to do. Where none ever is
  // free, a save takes as long as that lasts. False: they have the priority of the process.
  bool idle = true;
  int threads = 2;  // that copy into the arena
  Overlap overlap = Overlap::measured;
  // How long the caller of a save that is copied beside its step may stay away when all is copied
  // (SteadyMemory::require_unchanged). An operation of its own on that memory that was under way
  // all this time would go unseen. The end of the writer waits for no more than a quarter of
  // end_within, and a stop of the save ends that wait.
  std::chrono::milliseconds ask_within = std::chrono::seconds(10);
  // A process of its own saves in place of the thread: `tessera writer`, which each rank starts
  // when its writer is made. It outlives the trainer: what all ranks have staged it finishes, and
  // what not all have it drops, whatever ends them (docs/design/async.md; a kill of the whole
  // container or cgroup takes it along). It needs a path or URL that all ranks reach, and no
  // network: processes meet in a directory `.tessera-writer-*` beside the place, and drop a save to
  // which one of them does not come for `silence`. Stores of this process and options that are
  // functions, but for hooks, are `unsupported`. To make such a writer is collective. It has one
  // process, and is of no more use when that is gone (require_alive()).
  bool process = false;
  // The command; empty: TESSERA_COMMAND of the environment, or `tessera` beside this library, in
  // the `bin` beside its directory, or in PATH.
  std::string program = {};
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  // Others on this host may load the last save from memory: as `arena://` and its place, or that of
  // the run, it is a checkpoint of kind `arena`, once all ranks have staged, whether it is on a
  // disk yet or not. A process whose trainer has died, or ends its writer by an exception, keeps it
  // for so long; 0: nobody may. It goes earlier when a new writer has completed a save into the
  // same run. While somebody reads it, a save takes other memory, as much again. Of the memory
  // nobody else has a name, and other users cannot open it.
  std::chrono::milliseconds keep = std::chrono::milliseconds(0);
  // With `keep` and 1: the process of a rank on another host has a copy of this rank's last save,
  // for when this host is lost. It comes in the background by the network of TESSERA_ARENA_IFNAME,
  // or of GLOO_SOCKET_IFNAME, or that of the host's name; the log says which, how fast, and which
  // partners are on one machine. Whoever knows a token that the ranks tell each other may read it
  // there; it is not encrypted. A copy that the next save overtakes is not made.
  int partner = 0;
  // How long the destructor waits.
  std::chrono::milliseconds end_within = std::chrono::minutes(10);
};

class CheckpointWriter {
 public:
  // Every rank makes one over a group of its own, which the writer's thread alone uses from now on,
  // and which lives as long as the thread. Throws `invalid_argument` for no group, for threads that
  // are not 1 to 1024, a silence below a millisecond, other times below 0, `keep` without
  // `process` and `partner` without `keep`, and `io` where there is no memory for the arena.
  explicit CheckpointWriter(std::shared_ptr<Group> group, const WriterOptions& options = {});
  // The same for one process.
  explicit CheckpointWriter(const WriterOptions& options = {});
  // Waits until all saves are decided. Those that are not ten seconds before `end_within` is over,
  // or when half of it is, are asked to end, as by SaveOptions::stop. A thread that does not end
  // then either stays behind, with its arena and its group. So does at once, and is asked for
  // nothing, the thread of a writer that a hook of its own save ends. Warnings of the log say which
  // saves were lost, and which errors nobody took. In a child of fork() it does nothing.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Returns when the arena has all tensors of `tree`. Then the caller may change, free or replace
  // whatever the tree leads to: what is saved are values and tensors of this moment, bit for bit.
  // Of a storage all bytes are copied, once, however many tensors share it, so that kinds that keep
  // storages whole save what save() would. A path is that of this moment, whatever directory the
  // process changes to; a Store must stay what it is. Hooks of the options run on the writer's
  // thread, `stop` is heeded until the save is decided.
  //
  // Every rank calls it in the same order; a call is one save of the group on every rank, whatever
  // comes of it. So a rank that cannot take part (`limit`, no memory, a tree that save() refuses)
  // says so in the save itself, and result() is that error on all ranks. The next save works, if
  // the group is whole.
  //
  // An error of an earlier save that nobody has taken is thrown here, and nothing is saved: on
  // other ranks, if they had taken it, the save fails with the same code. Of several untaken ones
  // the first is thrown, and warnings tell the others.
  //
  // Until the save is decided, whoever opens that place in this process by load(), by
  // Checkpoint::open or as the source of a copy waits, as latest_checkpoint(), run_checkpoints()
  // and retain() of its run do, unless their `stop` ends that. The log notes whom they wait for.
  // Several threads take turns, and a stop ends that wait in one process: ranks keep their order.
  // In a child of fork() it is `invalid_argument`.
  PendingSave save(const Value& tree, const Location& where, const SaveOptions& options = {},
                   SaveDone done = {});
  // The same, but what `steady` has may be copied later, as WriterOptions::overlap says. All else
  // is copied when it returns. Before that memory changes or is given back somebody has to call
  // await_staged(). Optimizers, loads and whatever else of Tessera writes to parameters wait.
  PendingSave save(const Value& tree, const Location& where, const SaveOptions& options,
                   SaveDone done, SteadyMemory steady);

  // Of its group.
  [[nodiscard]] int ranks() const noexcept;

  // Throws `io`, saying how it ended, if the process that saves for this rank is gone
  // (WriterOptions::process). Then every later save() of this writer fails on all ranks. To go on,
  // ranks ask this after a save that failed, tell each other (agree() of comm.h), and if one has
  // lost its process all end their writers and make new ones. Not collective; does not wait.
  void require_alive() const;

  // Waits until all saves are decided and all callbacks have returned. Throws as save() does the
  // first error that nobody has taken. Not collective.
  void wait();

  // The trainer has failed: from now on the end of this writer leaves what its process keeps
  // (WriterOptions::keep), as an end by an exception does.
  void leave() noexcept;

  // Bytes that a save of the tree needs of the arena, for WriterOptions::bytes. Throws
  // `invalid_argument` as save() does for a tree that cannot be saved.
  [[nodiscard]] static std::uint64_t bytes_of(const Value& tree);

 private:
  std::shared_ptr<BackgroundWriter> writer_;  // the thread has it, too
};

}  // namespace tessera
