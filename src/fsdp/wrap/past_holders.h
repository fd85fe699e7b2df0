// libtorch's modules that call those inside of them by themselves, past every holder: what is below
// one of them cannot be a unit, since its calls cannot be seen.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/detail/slot.h"

namespace tessera::detail {

// Transformer with its encoder, decoder and layers, MultiheadAttention, AdaptiveLogSoftmaxWithLoss.
[[nodiscard]] bool calls_past_holders(const torch::nn::Module& module);

// Throws `invalid_argument` naming a module below `top` for which `is_unit` is true and that one of
// libtorch's modules, `top` or below it, calls by itself. `prefix`: of names.
void refuse_below_callers(const torch::nn::Module& top, const std::string& prefix,
                          const std::function<bool(const torch::nn::Module& module)>& is_unit);
// The same of what is a unit already.
void require_callable_units(const torch::nn::Module& top);

// Parameters that no unit has.

// Says once in the log which trained parameters of a model with units are in no unit, and were not
// meant to be: the outermost module was forgotten.
void warn_of_forgotten(const torch::nn::Module& module);

// Slots of Sequentials whose modules are libtorch's own: a policy that goes by sizes or by a
// function knows no types.

// For a module of one of libtorch's classes with parameters of their own, but those that call
// others past their holders (past_holders.h). Null for any other.
[[nodiscard]] SlotMaker slot_maker_of_libtorch(const std::shared_ptr<torch::nn::Module>& module);

// Several units that are made one after the other, or none of them.

// The modules and parameters of which shard_modules makes one unit.
struct UnitPlan {
  std::vector<UnitModule> modules;
  UnitSpec spec;
};

// Makes the units that `plan` gives, inner ones first. What is wrong with any of them is found out
// before the first is made, on all ranks of `mesh`, whose units they are. Later failures, of a
// param_init_fn or of a peer, leave those that were made. Collective.
void shard_in_turn(const Mesh& mesh, const std::function<std::vector<UnitPlan>()>& plan);

}  // namespace tessera::detail
