// Values and elements as JSON: what --json prints.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/error.h"
#include "tessera/layout.h"
#include "tessera/value.h"
#include "tessera/verify.h"

namespace tessera::cli {

// None, booleans, integers of 64 bits, finite floats and strings as JSON's own; lists, tuples and
// sets as arrays; dicts as objects, or as an array of pairs when a key is no string. Everything
// else (inf and nan, larger integers, complex numbers, bytes, objects) as the text that `render`
// gives, and so the whole value when it is made of more than `most` values.
[[nodiscard]] nlohmann::ordered_json json_of(const Value& value, std::size_t most);

// The facts of a value that is no tensor, added to a row: "type" as Python names it, "value" as
// above, and "text", which tells a tuple from a list and bytes from text at any depth.
void add_value(const Value& value, std::size_t most, nlohmann::ordered_json& row);

// One element of a tensor as text: integers as they are, floats by the shortest text, complex
// numbers as 1+2j, what C++ has no type for by its bytes.
[[nodiscard]] std::string element_text(DType dtype, const std::byte* at);
// The same as JSON: true, -0.0, "inf", "1+2j".
[[nodiscard]] nlohmann::ordered_json element_json(DType dtype, const std::byte* at);

// {"code", "message", "path", "key", "offset"}; the last three where they are known.
[[nodiscard]] nlohmann::ordered_json facts_of_error(const Error& error);
// An array with {"code", "text"} and these facts for each.
[[nodiscard]] nlohmann::ordered_json json_of_findings(const std::vector<Finding>& findings);
// {"error": these facts}
[[nodiscard]] nlohmann::ordered_json json_of(const Error& error);

// The document as --json prints it, on standard output; bytes that are no UTF-8 are replaced.
void print_json(const nlohmann::ordered_json& json, int indent = 1);

// An array, printed as print_json would, of which no more than one element is in memory.
class JsonRows {
 public:
  void add(const nlohmann::ordered_json& row);
  void end();  // behind the last one

 private:
  bool empty_ = true;
};

}  // namespace tessera::cli
