// Reports of the library as dicts, whose keys are the fields of the dataclasses in Python.
#pragma once

#include <nanobind/nanobind.h>

#include "tessera/job.h"
#include "tessera/save_options.h"

namespace tessera::python {

[[nodiscard]] nanobind::dict dict_of(const IoReport& report);
[[nodiscard]] nanobind::dict dict_of(const SaveResult& result);

}  // namespace tessera::python
