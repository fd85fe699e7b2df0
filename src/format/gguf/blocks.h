// The element types of GGUF: plain ones, and blocks of quantized elements (docs/formats/gguf.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/io.h"
#include "tessera/layout.h"

namespace tessera::gguf {

struct ElementType {
  std::uint32_t id = 0;
  std::string_view name;            // as ggml calls it: "Q8_0"
  std::int64_t elements = 1;        // of a block
  std::int64_t bytes = 0;           // of a block
  std::optional<DType> dtype = {};  // none: quantized
};

// Throws `unsupported` for a number that ggml has given to no type, or to one that it dropped.
[[nodiscard]] const ElementType& type_of(std::uint32_t id);
// Null: there is no such type.
[[nodiscard]] const ElementType* type_named(std::string_view name);

// Whether decode() knows the type: Q8_0, Q4_0 and Q4_1.
[[nodiscard]] bool can_decode(const ElementType& type);
// Fills `out` with the elements of whole blocks, as ggml computes them, in float32. `out` has room
// for exactly these.
void decode(const ElementType& type, ByteView blocks, std::span<float> out);

}  // namespace tessera::gguf
