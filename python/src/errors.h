// Errors of the library as exceptions of Python, which python/tessera/_errors.py has.
#pragma once

#include <nanobind/nanobind.h>

#include "tessera/error.h"

namespace tessera::python {

// The exception that says what `error` says.
[[nodiscard]] nanobind::object exception_of(const Error& error);
// From here on every Error that leaves a function of the module is raised as that.
void translate_errors();

}  // namespace tessera::python
