// Whether a value is this one thing.
#pragma once

#include <string_view>

#include "tessera/value.h"

namespace tessera {

// The class or function `name` of `module`, referred to by name.
[[nodiscard]] inline bool is_global(const Value& value, std::string_view module,
                                    std::string_view name) {
  return value.is(Value::Kind::global) && value.global_name() == name &&
         value.global_module() == module;
}

[[nodiscard]] inline bool is_text(const Value& value, std::string_view text) {
  return value.is(Value::Kind::string) && value.as_string() == text;
}

}  // namespace tessera
