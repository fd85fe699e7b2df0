// Slots of Sequentials whose modules are libtorch's own: a policy that goes by sizes or by a
// function knows no types.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "tessera/detail/slot.h"

namespace tessera::detail {

// For a module of one of libtorch's classes with parameters of their own, but those that call
// others past their holders (past_holders.h). Null for any other.
[[nodiscard]] SlotMaker slot_maker_of_libtorch(const std::shared_ptr<torch::nn::Module>& module);

}  // namespace tessera::detail
