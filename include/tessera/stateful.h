// Stateful: objects that give their state to a save and take it from a load, as in PyTorch's
// torch.distributed.checkpoint.
//
//   class Sampler : public Stateful {
//    public:
//     Value state_dict() const override { return Value::dict({{"seed", seed_}}); }
//     void load_state_dict(const Value& state) override { seed_ = state.at("seed").as_int(); }
//
//    private:
//     std::int64_t seed_ = 0;
//   };
//
//   Sampler sampler;
//   Value weights = Value::dict();
//   save({{"model", weights}, {"sampler", sampler}}, "run/step100");
//   ...
//   load({{"model", weights}, {"sampler", sampler}}, "run/step100");
//
// PyTorch loads what is saved this way as {"model": ..., "sampler": {"seed": ...}}, and the other
// way round. TrainingState (training_state.h) does this for a model and its optimizer.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

class Stateful {
 public:
  virtual ~Stateful() = default;

  // The state as a tree, in which tensors carry this rank's own pieces. A load fills the tensors'
  // memory in place and replaces the other leaves in the tree.
  [[nodiscard]] virtual Value state_dict() const = 0;
  // Takes the state: the tree of state_dict() after a load. Tensors that are in the object's own
  // memory hold their new elements already.
  virtual void load_state_dict(const Value& state) = 0;
};

// What stands at the top level of a state, by name. The objects and trees must outlive it.
using StatePart = std::variant<std::reference_wrapper<Value>, std::reference_wrapper<Stateful>>;
using StateMap = std::map<std::string, StatePart>;

// Saves the trees and the objects' states, each under its name, with save() of checkpoint.h.
// state_dict() of all objects is called first, in the order of the names; the trees themselves are
// not changed. If state_dict() is collective, all ranks must have the same names. What one rank's
// state_dict() throws is thrown on all ranks, and nothing is saved.
SaveResult save(const StateMap& state, const Location& where, const SaveOptions& options,
                Group& group);
SaveResult save(const StateMap& state, const Location& where, const SaveOptions& options = {});
SaveResult save(const StateMap& state, const Location& where, Group& group);

// Loads into the trees and the objects, with load() of checkpoint.h. Each object gives its
// state_dict(), the load goes into that, and when it has succeeded on all ranks the object gets it
// by load_state_dict(), in the order of the names. If the load fails, load_state_dict() is called
// on no rank. If load_state_dict() throws on one rank, all ranks throw after each of them has
// called it for its own objects up to the first that threw.
LoadReport load(const StateMap& state, const Location& where, const LoadOptions& options,
                Group& group);
LoadReport load(const StateMap& state, const Location& where, const LoadOptions& options = {});
LoadReport load(const StateMap& state, const Location& where, Group& group);
// The same from a checkpoint that every rank has opened, or that map() returned.
LoadReport load(const StateMap& state, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group);

// The trainer's state of an OLMo checkpoint: random numbers, the place in the data, counts of
// steps.

struct TrainerState {
  // A tree that owns its memory. None: no rank has saved one.
  std::optional<Value> state;
  // What this rank does not have of its own, in sentences. They go to the log as well.
  std::vector<std::string> warnings;
};

// Each rank gets what it has saved itself, where the checkpoint is of as many ranks as `group`:
// from `train/rank{r}.pt`, or of olmo-legacy what stands beside "model" and "optim" in
// `rank{r}.pt`. Else all get rank 0's without "rng", and a warning: equal random numbers on all
// ranks are worse than fresh ones. An olmo-full checkpoint has one state, in `train.pt` or, if that
// is absent, in `other.pt`: rank 0 gets it whole, the others without "rng".
//
// No rank ever gets another one's random numbers. By default each rank opens its own file alone;
// where all get rank 0's, rank 0 alone reads. With LoadReader::rank_zero it reads for all.
//
// Throws
//   `incomplete`   ranks have saved a state, but not this one's file: it names rank and file
//   `mismatch`     the states of two ranks are of different steps ("global_step")
//   `not_found`    there is no checkpoint
//   `unsupported`  of another kind: its trainer's state is a part of its tree
// Collective.
[[nodiscard]] TrainerState trainer_state(const Location& where, const LoadOptions& options,
                                         Group& group);

// The optimizer's state of a checkpoint, before there is an optimizer: PyTorch's
// torch.distributed.checkpoint.optimizer.
//
//   Value loaded = load_sharded_optimizer_state_dict("optim", "run/step100", group);
//
// An optimizer gets what lies under the key by set_optimizer_state_dict
// (tessera/pytorch/distributed_state_dict.h) or by optim_state_dict_to_load, with a state_dict_type
// of the sharded kind (tessera/pytorch/optim_state_dict.h).

// Loads what the checkpoint has under `optimizer_key`, a key at the top of its tree, and returns it
// as a tree {optimizer_key: ...}. Values are as they are in the checkpoint. Tensors have memory
// that the tree owns: one of a single element is whole on every rank; of every other a rank has the
// part that torch.chunk gives it of dimension 0, cut over the ranks of `group`, or no piece if
// there is none for it. Who saved it, on how many ranks and how sharded, does not matter.
//
// PyTorch's function takes the model's state too, from which it learns how tensor parallelism has
// cut the parameters; here nothing cuts them so.
//
// Throws `not_found` for a key that the tree does not have at its top, and what load() throws.
// `rename` of the options is `invalid_argument`. Collective over `group`.
[[nodiscard]] Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                                      const Location& where,
                                                      const LoadOptions& options, Group& group);
[[nodiscard]] Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                                      const Location& where, Group& group);
// The same from a checkpoint that every rank has opened, or that map() returned.
[[nodiscard]] Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                                      const Checkpoint& checkpoint,
                                                      const LoadOptions& options, Group& group);

}  // namespace tessera
