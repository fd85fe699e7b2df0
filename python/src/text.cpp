#include "text.h"

namespace tessera::python {
namespace {

// `bytes`: a new reference, or null with Python's error set.
std::string taken(PyObject* bytes) {
  if (bytes == nullptr) throw nb::python_error();
  const auto held = nb::steal<nb::bytes>(bytes);
  return {held.c_str(), held.size()};
}

nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

}  // namespace

std::string text_of(nb::handle string) {
  return taken(PyUnicode_AsEncodedString(string.ptr(), "utf-8", "surrogatepass"));
}

nb::object string_of(std::string_view text) {
  return checked(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
}

nb::object string_or_none(std::string_view text) {
  return text.empty() ? nb::object(nb::none()) : string_of(text);
}

std::string path_of(nb::handle path) {
  return taken(PyUnicode_EncodeFSDefault(path.ptr()));
}

nb::object string_of_path(std::string_view path) {
  return checked(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

}  // namespace tessera::python
