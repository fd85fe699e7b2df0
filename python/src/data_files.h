// Data files and commits of saves that torch plans.
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

void bind_data_files(nanobind::module_& module);

}  // namespace tessera::python
