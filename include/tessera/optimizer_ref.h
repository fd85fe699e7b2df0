// OptimizerRef: any optimizer in the form that functions on optimizer state need. You can describe
// your own optimizers, too.
//
//   torch::optim::Adam adam(local_tensors(sharded_parameters(model)));
//   Value state = optimizer_state_dict(adam);   // as Python's Adam.state_dict() gives it
//   load_optimizer_state_dict(adam, state);
//
// Known are torch::optim's Adam, AdamW, SGD, Adagrad, RMSprop and LBFGS, and tessera::AdamW. To
// describe an optimizer of your own that derives from torch::optim::Optimizer, list the fields of
// its state and of its options:
//
//   register_optimizer<MyOptimizer, MyState, MyOptions>(
//       [](StateFields& fields, MyState& state) {
//         fields.count("step", state.step());
//         fields.tensor("momentum", state.momentum());
//       },
//       [](StateFields& fields, MyOptions& options) { fields.number("lr", options.lr()); });
//
// torch::save of an optimizer writes what this rank has, without a word. Of parameters that are
// sharded that is a part, of use to the same rank of as many ranks alone: save a TrainingState
// (training_state.h). Of tessera::AdamW it does not compile.
//
// One list serves saving and loading. It is compared with what the types write in their own
// `serialize`, once when it is registered and again when the first state is saved. So a field that
// the list lacks is an error, and is never lost.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/optim.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// Visits the fields of a state or of options, in PyTorch's order. Saving reads the fields; loading
// replaces those that the loaded state has.
class StateFields {
 public:
  virtual ~StateFields() = default;
  // A number of steps, in PyTorch a float32 scalar tensor. Loading takes plain numbers, too.
  virtual void count(const char* name, std::int64_t& field) = 0;
  // A tensor of the parameter's shape. If it is undefined, PyTorch has no such entry.
  virtual void tensor(const char* name, at::Tensor& field) = 0;
  virtual void number(const char* name, double& field) = 0;
  virtual void integer(const char* name, std::int64_t& field) = 0;
  virtual void flag(const char* name, bool& field) = 0;
  // Anything else: `get` returns it, and `set` takes what was loaded.
  virtual void value(const char* name, const std::function<Value()>& get,
                     const std::function<void(const Value&)>& set) = 0;
  // An option that PyTorch's optimizer has and this one lacks. It is saved as `value`. If
  // `must_match`, loading another value throws `unsupported`; otherwise it is ignored, since such
  // an option only chooses how to compute.
  virtual void fixed(const char* name, const Value& value, bool must_match) = 0;
};

// How one type of optimizer that derives from torch::optim::Optimizer keeps its state.
struct OptimizerFormat {
  std::string name;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>()> make_options;
  std::function<void(StateFields&, torch::optim::OptimizerParamState&)> state;
  std::function<void(StateFields&, torch::optim::OptimizerOptions&)> options;
};

// Throws `invalid_argument` naming a field that the types serialize and the lists lack. A type may
// be registered again. May be called from any thread.
void register_optimizer(std::type_index type, OptimizerFormat format);

template <typename Optimizer, typename State, typename Options>
void register_optimizer(std::function<void(StateFields&, State&)> state,
                        std::function<void(StateFields&, Options&)> options) {
  register_optimizer(
      typeid(Optimizer),
      {.name = typeid(Optimizer).name(),
       .make_state = [] { return std::make_unique<State>(); },
       .make_options = [] { return std::make_unique<Options>(); },
       .state =
           [state = std::move(state)](StateFields& fields, torch::optim::OptimizerParamState& of) {
             state(fields, static_cast<State&>(of));
           },
       .options =
           [options = std::move(options)](StateFields& fields, torch::optim::OptimizerOptions& of) {
             options(fields, static_cast<Options&>(of));
           }});
}

// What the functions need of an optimizer. Implement it for an optimizer that does not derive from
// torch::optim::Optimizer.
class OptimizerAccess {
 public:
  virtual ~OptimizerAccess() = default;
  // The parameters of each group, in the order of the groups.
  [[nodiscard]] virtual std::vector<std::vector<at::Tensor>> parameters() const = 0;
  // The options of a group: a dict with PyTorch's keys, without "params".
  [[nodiscard]] virtual Value group(std::size_t index) const = 0;
  // Throws what set_group would throw.
  virtual void check_group(std::size_t index, const Value& options) const = 0;
  virtual void set_group(std::size_t index, const Value& options) = 0;
  // A dict whose tensors are views of the state's memory, or `none` before the parameter's first
  // step.
  [[nodiscard]] virtual Value state(const at::Tensor& parameter) const = 0;
  // Throws what set_state would throw.
  virtual void check_state(const at::Tensor& parameter, const Value& state) const = 0;
  // `none` forgets the state. Tensors move to the parameter's device, and take its dtype if both
  // are floating. They are copied unless `keep` says that nobody else has them.
  virtual void set_state(const at::Tensor& parameter, const Value& state, bool keep) = 0;
  // The entries that a first step makes for this parameter, with zeros in all tensors: the state of
  // which nothing has been learnt yet. Changes nothing. `none`: a step makes none, or only the
  // optimizer itself could say.
  [[nodiscard]] virtual Value first_state(const at::Tensor& /*parameter*/) const { return {}; }
  // Tensors of the state that its steps and set_state() alone change, where these wait for saves in
  // the background that still copy, as those of tessera::AdamW do. None: they do not wait.
  [[nodiscard]] virtual std::optional<std::vector<at::Tensor>> awaited_state() const { return {}; }
};

// Functions make it from their argument. It may also be kept as long as the optimizer lives.
class OptimizerRef {
 public:
  // Throws `unsupported` for a type that nobody registered.
  OptimizerRef(torch::optim::Optimizer& optimizer);       // NOLINT(*-explicit-*)
  OptimizerRef(AdamW& optimizer);                         // NOLINT(*-explicit-*)
  OptimizerRef(std::shared_ptr<OptimizerAccess> access);  // NOLINT(*-explicit-*)
  // Several optimizers of one model as one, whose groups follow one another: what PyTorch's
  // get_optimizer_state_dict makes of a list of optimizers. Throws `invalid_argument` if two have
  // one parameter.
  [[nodiscard]] static OptimizerRef several(const std::vector<OptimizerRef>& optimizers);

  using Names = std::unordered_map<const c10::TensorImpl*, std::string>;
  // The same optimizer, but its state has these names of its parameters as keys instead of numbers.
  [[nodiscard]] OptimizerRef with_names(std::shared_ptr<const Names> names) const;
  [[nodiscard]] bool is_named() const noexcept { return names_ != nullptr; }
  // The key of a parameter: its number, counted through the groups, or its name.
  struct Key {
    Value key;
    at::Tensor parameter;
  };
  // The keys of all parameters, by group.
  [[nodiscard]] std::vector<std::vector<Key>> keys() const;
  [[nodiscard]] OptimizerAccess& access() const noexcept { return *access_; }

 private:
  std::shared_ptr<OptimizerAccess> access_;
  std::shared_ptr<const Names> names_;
};

// What torch::save and torch::load would call.
template <std::same_as<AdamW> Optimizer>
void operator<<(torch::serialize::OutputArchive& /*archive*/, const Optimizer& /*optimizer*/) {
  static_assert(!std::same_as<Optimizer, AdamW>,
                "torch::save would write this rank's part of an AdamW: save a "
                "tessera::TrainingState (tessera/training_state.h), or what "
                "tessera::optimizer_state_dict(optimizer) gives");
}
template <std::same_as<AdamW> Optimizer>
void operator>>(torch::serialize::InputArchive& /*archive*/, Optimizer& /*optimizer*/) {
  static_assert(!std::same_as<Optimizer, AdamW>,
                "torch::load cannot fill an AdamW: load a tessera::TrainingState "
                "(tessera/training_state.h), or call tessera::load_optimizer_state_dict");
}

// Returns {"state": {key: {name: value}}, "param_groups": [{..., "params": [key, ...]}]}, which is
// PyTorch's own form. Parameters without state are not in "state". Tensors are views of the
// optimizer's memory, not copies; scalars are copies. With names, `params` are sorted.
[[nodiscard]] Value optimizer_state_dict(const OptimizerRef& optimizer);

// The reverse. As in PyTorch, groups and parameters are matched by their place, and state by the
// keys that the groups list. Tensors are copied. Parameters that the state does not list lose
// theirs. Throws `mismatch` if groups or parameters differ in number, if a key of the groups
// belongs to no parameter, or if a tensor has another shape than it needs, and `unsupported` for
// options that the optimizer lacks; then nothing was changed. Entries of other keys are passed over
// with a warning. `keep` says that nobody else has the tensors, so they are not copied.
void load_optimizer_state_dict(const OptimizerRef& optimizer, const Value& state_dict,
                               bool keep = false);

}  // namespace tessera
