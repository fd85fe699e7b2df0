// Saves of a tree that Python holds.
#pragma once

#include <nanobind/nanobind.h>

#include "options.h"
#include "tessera/save_options.h"

namespace tessera::python {

// By their names in Python. What else is given is not looked at.
[[nodiscard]] SaveOptions save_options(const Options& all);

void bind_saves(nanobind::module_& module);

}  // namespace tessera::python
