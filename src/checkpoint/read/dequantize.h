// Quantized weights as what they stand for (docs/formats/safetensors.md, docs/formats/gguf.md,
// checkpoint-rows P-28).
#pragma once

#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

// The leaves with quantized tensors replaced, at their place, by tensors of the floating type `to`
// that are computed as they are read, in bounded memory; scales and types disappear. Recognized are
//   X.weight, a float8 matrix, with X.weight_scale_inv, a scale for every block of 128 x 128;
//   X_blocks with X_scales (MXFP4), which become X; of experts [expert, out, in] it is a view
//   [expert, in, out], as transformers has the parameter of that name;
//   X, bytes of blocks, with gguf_types.X, the name of their type: Q8_0, Q4_0 or Q4_1.
// Throws `mismatch` when scales or a type do not fit their tensor, `unsupported` for element types
// that are none of these formats' and for other types of blocks, `conflict` when X is there
// already.
[[nodiscard]] std::vector<Leaf> dequantized(const std::vector<Leaf>& leaves, DType to);

}  // namespace tessera
