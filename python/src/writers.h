// CheckpointWriter for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void bind_writers(nanobind::module_& module);

}  // namespace tessera::python
