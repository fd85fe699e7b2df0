// Strings of Python and ours. Names in checkpoints may have lone surrogates, which strict UTF-8
// refuses.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

namespace tessera::python {

namespace nb = nanobind;

// What a function of Python's returned: a new reference, or null where it has raised.
[[nodiscard]] nb::object owned(PyObject* returned);

// Throws Python's TypeError for what is no string.
[[nodiscard]] std::string text_of(nb::handle string);
// Bytes that are no UTF-8, as in a message about a path, are lone surrogates, as in Python's paths.
[[nodiscard]] nb::object string_of(std::string_view text);
// None where there is no text.
[[nodiscard]] nb::object string_or_none(std::string_view text);
// A path as the file system has it. Throws Python's ValueError for one that has a byte of 0.
[[nodiscard]] std::string path_of(nb::handle path);
// The same for a place that is about to be opened: what a URL needs is loaded with the
// interpreter's lock, since libraries that begin read the environment.
[[nodiscard]] std::string place_of(nb::handle path);
[[nodiscard]] nb::object string_of_path(std::string_view path);
[[nodiscard]] nb::object path_or_none(std::string_view path);

}  // namespace tessera::python
