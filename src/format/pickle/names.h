// What is known about names of Python's classes and functions.
#pragma once

#include <string>
#include <string_view>

namespace tessera::pickle {

// Whether calling the name runs code, opens files or reaches the system. Names that walk through
// attributes ("f.__globals__") count when one step could.
[[nodiscard]] bool is_dangerous(std::string_view module, std::string_view name);
// Whether an attribute of this name may lead out of the object that has it.
[[nodiscard]] bool is_dangerous_attribute(std::string_view name);

// Protocols below 3 write Python 2's names: `__builtin__` for builtins and so on. Each changes both
// strings in place when the table has the name.
void from_python2(std::string& module, std::string& name);
void to_python2(std::string& module, std::string& name);

}  // namespace tessera::pickle
