#include "errors.h"

#include <nanobind/stl/string.h>

#include "text.h"

namespace tessera::python {
namespace {

void raise(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    // Python code makes the exception, so that an interrupt may come in it: that is raised then.
    try {
      const nb::object exception = exception_of(error);
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
    } catch (nb::python_error& other) {
      other.restore();
    }
  }
}

}  // namespace

nb::object exception_of(const Error& error) {
  nb::dict peers;
  for (const auto& [rank, failure] : error.peers()) peers[nb::int_(rank)] = exception_of(failure);
  nb::object offset = nb::none();
  if (error.offset()) offset = nb::int_(*error.offset());
  return nb::module_::import_("tessera._errors")
      .attr("error_of")(string_of(to_string(error.code())), string_of(error.what()),
                        path_or_none(error.path()), string_or_none(error.key()), offset, peers,
                        error.is_no_checkpoint());
}

void translate_errors() {
  nb::register_exception_translator(raise);
}

}  // namespace tessera::python
