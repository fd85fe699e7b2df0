// Quantized weights as what they stand for (docs/formats/safetensors.md, checkpoint-rows P-28).
#pragma once

#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

// The leaves with quantized tensors replaced, at their place, by tensors of the floating type `to`
// that are computed as they are read, in bounded memory; the scales disappear. Recognized are
//   X.weight, a float8 matrix, with X.weight_scale_inv, a scale for every block of 128 x 128;
//   X_blocks with X_scales (MXFP4), which become X; of experts [expert, out, in] it is a view
//   [expert, in, out], as transformers has the parameter of that name.
// Throws `mismatch` when scales do not fit their tensor, `unsupported` for element types that are
// none of these formats', `conflict` when X is there already.
[[nodiscard]] std::vector<Leaf> dequantized(const std::vector<Leaf>& leaves, DType to);

}  // namespace tessera
