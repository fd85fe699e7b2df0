// Opened checkpoints: what is in them, and their tensors' bytes into memory that Python owns.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void bind_checkpoints(nanobind::module_& module);

}  // namespace tessera::python
