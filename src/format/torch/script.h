// Trees of what TorchScript's archives pickle: modules, optimizers, values with a type beside them.
#pragma once

#include <functional>
#include <string>

#include "format/torch/torch_file.h"
#include "tessera/value.h"

namespace tessera::torch_file {

// The text of a file of code, "__torch__/torch/nn"; empty: there is none.
using CodeOf = std::function<std::string(const std::string& module)>;

// `data` and `constants`: what the two pickles hold. Throws `corrupt` for modules that hold
// themselves, and `limit` for ones that are in so many places that their names would take over
// 128 MiB.
[[nodiscard]] Script script_of(const Value& data, const Value& constants, const CodeOf& code_of);

// Whether `callable(*arguments)` is how C++ pickles a value with its type, "restore_type_tag" and
// lists of numbers and tensors; then `result` is the value.
[[nodiscard]] bool restore_typed(const Value& callable, const Value& arguments, Value& result);

}  // namespace tessera::torch_file
