// What of a training stays as it is until the next step of its optimizer.
#pragma once

#include "tessera/checkpoint_writer.h"
#include "tessera/training_state.h"

namespace tessera::detail {

// For a save that is copied beside the next forward and backward: the storages of parameters, and
// of moments whose optimizer waits. Buffers and the program's own tensors are none of these, nor is
// what shares a storage with one. libtorch counts what changes a tensor: a parameter that was
// changed is `conflict`, by its name.
[[nodiscard]] SteadyMemory steady_memory(const TrainingState& state);

}  // namespace tessera::detail
