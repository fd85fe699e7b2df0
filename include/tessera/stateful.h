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
#include <string>
#include <variant>

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

}  // namespace tessera
