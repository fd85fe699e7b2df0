#include "text.h"

#include "tessera/stores.h"

namespace tessera::python {
namespace {

std::string taken(PyObject* returned) {
  const auto bytes = nb::cast<nb::bytes>(owned(returned));
  return {bytes.c_str(), bytes.size()};
}

}  // namespace

nb::object owned(PyObject* returned) {
  if (returned == nullptr) throw nb::python_error();
  return nb::steal(returned);
}

std::string text_of(nb::handle string) {
  return taken(PyUnicode_AsEncodedString(string.ptr(), "utf-8", "surrogatepass"));
}

nb::object string_of(std::string_view text) {
  const auto size = static_cast<Py_ssize_t>(text.size());
  if (PyObject* string = PyUnicode_DecodeUTF8(text.data(), size, "surrogatepass"))
    return nb::steal(string);
  PyErr_Clear();
  return owned(PyUnicode_DecodeUTF8(text.data(), size, "surrogateescape"));
}

nb::object string_or_none(std::string_view text) {
  return text.empty() ? nb::object(nb::none()) : string_of(text);
}

std::string path_of(nb::handle path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw nb::python_error();
  return taken(bytes);
}

std::string place_of(nb::handle path) {
  std::string place = path_of(path);
  prepare_store(place);
  return place;
}

nb::object path_or_none(std::string_view path) {
  return path.empty() ? nb::object(nb::none()) : string_of_path(path);
}

nb::object string_of_path(std::string_view path) {
  return owned(PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

}  // namespace tessera::python
