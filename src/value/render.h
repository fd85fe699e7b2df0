// Values as one line of text, safe to print: for messages, listings and names of keys.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/value.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// "a list", "a string": for messages.
[[nodiscard]] std::string_view describe(Value::Kind kind) noexcept;

// The name of its Python type: "dict", "OrderedDict", "defaultdict".
[[nodiscard]] std::string_view type_name(DictKind kind) noexcept;

// `text` without anything that a terminal could obey: control characters, direction marks and bytes
// that are not UTF-8 become escapes. Cut to about `cap` bytes, with "..." in the place of the rest.
[[nodiscard]] std::string printable(std::string_view text, std::size_t cap = 4096);

// A name as the command prints it: printable, with two backslashes for one, so that no two names
// look alike. Cut as above.
[[nodiscard]] std::string printable_name(std::string_view name, std::size_t cap = 4096);
// The name that is printed as `text` and differs from it; empty: there is none.
[[nodiscard]] std::optional<std::string> printed_name(std::string_view text);

// The value as Python would write it, printable, cut to about `cap` bytes. Work is bounded by
// `cap`, not by the value.
[[nodiscard]] std::string render(const Value& value, std::size_t cap = 200);

// Python's repr of a float: the shortest text that reads back the same, "1.0", "1e-05", "inf".
[[nodiscard]] std::string render_real(double value);

// Python's str() of a dict key: strings as they are, 3 -> "3", True -> "True".
[[nodiscard]] std::string key_text(const Value& key);

}  // namespace tessera
#pragma GCC visibility pop
