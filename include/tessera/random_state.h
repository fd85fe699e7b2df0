// The states of random number generators, as trainers keep them in checkpoints.
//
//   trainer.set_item("rng", random_state());
//   ...
//   set_random_state(trainer.at("rng"));
//
// Every rank has its own: in a TrainingState it belongs into `rank_values`.
#pragma once

#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// A dict with "torch", the state of libtorch's default generator on the CPU, and "cuda", that of
// the current CUDA device: tensors of uint8 with the bytes that Python's torch.get_rng_state() and
// torch.cuda.get_rng_state() give. Where there is no CUDA device, "cuda" has no elements. Other
// entries of `before`, such as Python's own "python" and "numpy", come first and stay as they are.
[[nodiscard]] Value random_state(const Value& before = Value::dict());

// Sets the generators from such a dict. Entries that it lacks change nothing, and neither does
// "cuda" if it has no elements or this process no CUDA device. Throws `mismatch` for anything but
// tensors of uint8 in memory, and `corrupt` for bytes that are no generator's state.
void set_random_state(const Value& state);

// A state for rank `rank` where a checkpoint has rank 0's alone. The generator of the CPU gets the
// seed CRC-32(bytes of rank 0's state, then the rank as four bytes, lowest first), the generator of
// CUDA the same of its own state. So no two ranks get the same seed, and every restore of the
// checkpoint gives the same ones. Entries of other generators are left out: only their owners can
// derive states. Rank 0 keeps the state as it is. Throws as set_random_state.
[[nodiscard]] Value derived_random_state(const Value& state, int rank);

}  // namespace tessera
