// torch::Tensor and Value: tensors of a program among the values of its training, and back.
//
//   auto average = torch::zeros({10});
//   TrainingState state(model, optimizer);
//   state.values.set_item("average", to_value(average));
//   load(state, "run/latest", mesh.checkpoint_group());  // fills `average`
//   auto same = to_tensor(state.values.at("average"));   // the memory of `average`
//
// A load fills the memory of tensors that are among the values, and puts none in their place. It
// casts to their dtype. Where it is asked for whatever is there, by a none or an empty dict, the
// tensors that it finds have memory of their own.
//
// All ranks give the same whole tensors as `values`. What each has for itself, also a part of a
// larger tensor, is one of its `rank_values`.
#pragma once

#include <torch/types.h>

#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// A tensor leaf over the memory of `tensor`, which it keeps alive: what is done to one shows in the
// other, also a load. The memory is that of now: resize_ and set_data give `tensor` another, and so
// do units to their parameters (which a TrainingState has as its model). Strides stay, and so do
// the bits that make a tensor the conjugate or the negative of its memory. The history and whether
// it requires a gradient are left out. Of a tensor on a CUDA device, copies come after what the
// calling thread has queued on its current stream. Throws `invalid_argument` for an undefined
// tensor. Throws `unsupported` for one that is not dense (sparse) or on another device, and for
// dtypes that checkpoints here lack (quantized ones).
[[nodiscard]] Value to_value(const torch::Tensor& tensor);

// A tensor over the memory of such a leaf, which it keeps alive; one without elements has no
// memory. Leaves in memory that no tensor of libtorch made are right, too: those that
// Checkpoint::load gives. Throws `mismatch` for a value that is no tensor. Throws `unsupported` for
// a tensor that is not in memory, as those of an opened checkpoint, or of which only parts are, and
// for dtypes that libtorch lacks.
[[nodiscard]] torch::Tensor to_tensor(const Value& value);
[[nodiscard]] torch::Tensor to_tensor(const Tensor& tensor);

}  // namespace tessera
