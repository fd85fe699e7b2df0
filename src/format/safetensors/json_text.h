// Strings as JSON, as the two libraries write them whose files we repeat to the byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::safetensors {

enum class JsonText : std::uint8_t {
  utf8,   // serde_json: characters beyond ASCII as they are
  ascii,  // Python: as \u escapes
};

// Appends `text` with its quotes. Throws `invalid_argument` when it is not UTF-8.
void append_json(std::string& out, std::string_view text, JsonText how);

}  // namespace tessera::safetensors
