// Reads a `.metadata` as PyTorch's pickler lays it out, without a value for each of its parts.
//
// A checkpoint of a large job has a million chunks, each of which is some seventy opcodes and a
// dozen Python objects. Here each becomes one record as soon as its object is complete, and a batch
// of records a part of the result: beside it there is memory for one batch, and for what the
// pickle's memo gives out again.
#pragma once

#include <optional>

#include "format/dcp/dcp.h"

namespace tessera::dcp {

// The same as decode_values(), or nullopt for whatever is not laid out as expected: unusual
// opcodes, other classes, anything that is wrong. Never throws for what is in `bytes`.
[[nodiscard]] std::optional<Metadata> quick_decode(ByteView bytes);

// decode() by values alone: reads everything that can be read and says what is wrong.
[[nodiscard]] Metadata decode_values(ByteView bytes);

}  // namespace tessera::dcp
