// What is known about names of Python's classes and functions.
#pragma once

#include <string>
#include <string_view>

namespace tessera::pickle {

// Whether calling the name runs code, opens files or reaches the system. Names that walk through
// attributes ("f.__globals__") count when one step could.
[[nodiscard]] bool is_dangerous(std::string_view module, std::string_view name);
// Whether such a name is one of the classes of settings that torch.compile leaves beside a module
// that is pickled whole. They are read where the module is replaced, and they go with it.
[[nodiscard]] bool is_of_compiler(std::string_view module, std::string_view name);
// Whether an attribute of this name may lead out of the object that has it.
[[nodiscard]] bool is_dangerous_attribute(std::string_view name);

// Whether getattr(owner, name) names a member of an Enum or a nested class that checkpoints have:
// a closed list. Python 3.11.0 to 3.11.3 write members so, all Pythons nested classes below
// protocol 4. No other use of getattr is known to be harmless.
[[nodiscard]] bool is_known_member(std::string_view module, std::string_view owner,
                                   std::string_view name);

// Protocols below 3 write Python 2's names: `__builtin__` for builtins and so on. Each changes both
// strings in place when the table has the name.
void from_python2(std::string& module, std::string& name);
void to_python2(std::string& module, std::string& name);

}  // namespace tessera::pickle
