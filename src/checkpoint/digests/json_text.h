// JSON as text, for what a save writes. The JSON library takes its values apart with memory that it
// allocates in their destructors: where none is left, it ends the process (fault-rows F16).
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// `text` in quotation marks, as the JSON library writes it: what is not UTF-8 is replaced.
// `ascii`: characters beyond ASCII are escaped.
[[nodiscard]] std::string json_quoted(const std::string& text, bool ascii);

// JSON without white space, with a line for each entry, as the library's dump(1) has it.
[[nodiscard]] std::string json_in_lines(std::string_view json);

}  // namespace tessera
