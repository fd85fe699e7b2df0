// What is done with whole checkpoints: convert, verify, diff, scan, seal.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void bind_operations(nanobind::module_& module);

}  // namespace tessera::python
