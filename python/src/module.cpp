// What python/tessera calls: its own private module, which checks nothing that Python can check.
#include <nanobind/nanobind.h>

#include <string>

#include "checkpoints.h"
#include "data_files.h"
#include "ending.h"
#include "errors.h"
#include "jobs.h"
#include "operations.h"
#include "saves.h"
#include "tensors.h"
#include "tessera/library.h"
#include "writers.h"

NB_MODULE(_core, module) {
  module.attr("VERSION") = std::string(tessera::version()).c_str();
  tessera::python::translate_errors();
  tessera::python::bind_ending(module);
  tessera::python::hear_warnings();
  tessera::python::bind_tensors(module);
  tessera::python::bind_checkpoints(module);
  tessera::python::bind_operations(module);
  tessera::python::bind_saves(module);
  tessera::python::bind_writers(module);
  tessera::python::bind_data_files(module);
}
