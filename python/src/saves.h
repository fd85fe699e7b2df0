// Saves of a tree that Python holds, by one process.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void bind_saves(nanobind::module_& module);

}  // namespace tessera::python
