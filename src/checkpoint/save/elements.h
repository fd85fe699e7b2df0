// The elements of a chunk in this rank's memory.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>

#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/save/planned_leaf.h"

namespace tessera {

// Where they lie densely they are copied from a device alone, and ahead. `reader` is of the tensor;
// it and `chunk` outlive the source.
[[nodiscard]] ElementSource elements_of(const Tensor& tensor, const HeldChunk& chunk,
                                        TensorReader& reader);

// A sample of them (copies.h). Of a device all its windows are on their way at once.
[[nodiscard]] std::uint64_t sample_of_chunk(const Tensor& tensor, const std::string& name,
                                            const HeldChunk& chunk);

// A digest of all of them. Throws `cancelled` when `stop` is requested.
[[nodiscard]] std::uint64_t digest_of_chunk(const Tensor& tensor, const std::string& name,
                                            const HeldChunk& chunk, const std::stop_token& stop);

}  // namespace tessera
