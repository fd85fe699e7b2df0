#include "values.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/error.h"
#include "tessera/numpy_array.h"
#include "text.h"

namespace tessera::python {
namespace {

class Converter {
 public:
  explicit Converter(nb::object wrap)
      : wrap_(std::move(wrap)),
        values_(nb::module_::import_("tessera._values")),
        opaque_(values_.attr("Opaque")),
        known_(nb::module_::import_("tessera._known")) {}

  nb::object operator()(const Value& value) {
    // Small things have no identity that anybody could see, and there may be millions.
    if (!value.is_shared()) return made(value);
    const auto found = made_.find(value.identity());
    if (found != made_.end()) return found->second;
    nb::object object = made(value);
    made_.emplace(value.identity(), object);
    return object;
  }

 private:
  nb::object made(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::none:
        return nb::none();
      case Value::Kind::boolean:
        return nb::bool_(value.as_bool());
      case Value::Kind::integer:
        return integer(value.as_integer());
      case Value::Kind::real:
        return nb::float_(value.as_real());
      case Value::Kind::complex:
        return owned(PyComplex_FromDoubles(value.as_complex().real(), value.as_complex().imag()));
      case Value::Kind::string:
        return string_of(value.as_string());
      case Value::Kind::bytes:
        return nb::bytes(value.as_bytes().data(), value.as_bytes().size());
      case Value::Kind::bytearray:
        return nb::bytearray(value.as_bytes().data(), value.as_bytes().size());
      case Value::Kind::list:
        return list(value.items());
      case Value::Kind::tuple:
        return nb::tuple(list(value.items()));
      case Value::Kind::set:
        return set(value.items(), PySet_New);
      case Value::Kind::frozenset:
        return set(value.items(), PyFrozenSet_New);
      case Value::Kind::dict:
        return dict(value);
      case Value::Kind::tensor:
        return wrap_(nb::cast(TensorHandle(value)));
      case Value::Kind::global:
        return known_.attr("global_of")(
            string_of(value.global_module() + "." + value.global_name()));
      case Value::Kind::object:
        return object(value);
    }
    return nb::none();
  }

  static nb::object integer(const Integer& integer) {
    if (integer.big.empty()) return nb::int_(integer.small);
    const nb::bytes bytes(integer.big.data(), integer.big.size());
    return nb::borrow(reinterpret_cast<PyObject*>(&PyLong_Type))
        .attr("from_bytes")(bytes, "little", nb::arg("signed") = true);
  }

  nb::list list(const Value::List& items) {
    nb::list list;
    for (const Value& item : items) list.append((*this)(item));
    return list;
  }

  nb::list pairs(const std::vector<Value::Pair>& items, bool of_dict) {
    nb::list list;
    for (const auto& [key, item] : items) {
      // In this order, so that what is shared is found.
      nb::object name = of_dict ? hashable(key) : (*this)(key);
      list.append(nb::make_tuple(name, (*this)(item)));
    }
    return list;
  }

  // A file may have for a key what only another version of Python can hash, or none.
  [[noreturn]] static void refuse_key(nb::handle key) {
    nb::python_error raised;
    if (!raised.matches(PyExc_Exception)) throw std::move(raised);
    throw Error(ErrorCode::unsupported,
                "a dict or set has a " + text_of(key.type().attr("__name__")) +
                    " for a key, which this version of Python has no hash of");
  }

  nb::object hashable(const Value& value) {
    nb::object made = (*this)(value);
    if (PyObject_Hash(made.ptr()) == -1) refuse_key(made);
    return made;
  }

  // What PySet_New or PyFrozenSet_New makes of the items.
  nb::object set(const Value::List& items, PyObject* (*make)(PyObject*)) {
    nb::list list;
    for (const Value& item : items) list.append(hashable(item));
    return owned(make(list.ptr()));
  }

  nb::object dict(const Value& value) {
    if (value.dict_kind() == DictKind::dict) {
      nb::dict dict;
      for (const auto& [key, item] : value.pairs()) {
        const nb::object name = hashable(key);
        dict[name] = (*this)(item);
      }
      return dict;
    }
    const auto optional = [this](const Value* part) {
      return part == nullptr ? nb::object(nb::none()) : (*this)(*part);
    };
    return values_.attr("dict_of")(value.dict_kind() == DictKind::ordered_dict,
                                   pairs(value.pairs(), true), optional(value.default_factory()),
                                   optional(value.container_state()));
  }

  nb::object object(const Value& value) {
    const Object& object = value.as_object();
    const auto optional = [this](const std::optional<Value>& part) {
      return part ? (*this)(*part) : nb::object(nb::none());
    };
    const std::string name = object.name();
    nb::object made = known_.attr("opaque_of")(
        name.empty() ? (*this)(object.callable) : string_of(name), (*this)(object.arguments),
        optional(object.keywords), optional(object.state), list(object.list_items),
        pairs(object.dict_items, false), object.by_new);
    if (!made.type().is(opaque_)) return made;
    auto array = numpy_array(value);
    return array ? known_.attr("with_elements")(
                       made, wrap_, nb::cast(TensorHandle(Value(std::move(array->tensor)))))
                 : made;
  }

  nb::object wrap_;
  nb::object values_, opaque_, known_;
  std::unordered_map<const void*, nb::object> made_;  // by node
};

// Goes down a value, once into each node that has several parents.
class Search {
 public:
  bool operator()(const Value& value) {
    if (value.is_shared() && !seen_.insert(value.identity()).second) return false;
    switch (value.kind()) {
      case Value::Kind::tensor:
        return true;
      case Value::Kind::list:
      case Value::Kind::tuple:
      case Value::Kind::set:
      case Value::Kind::frozenset:
        return any(value.items());
      case Value::Kind::dict:
        return any(value.pairs());
      case Value::Kind::object:
        return in(value.as_object());
      default:
        return false;
    }
  }

 private:
  bool any(const Value::List& items) { return std::ranges::any_of(items, std::ref(*this)); }
  bool any(const std::vector<Value::Pair>& pairs) {
    return std::ranges::any_of(pairs, [this](const Value::Pair& pair) {
      return (*this)(pair.first) || (*this)(pair.second);
    });
  }
  bool in(const Object& object) {
    return (*this)(object.callable) || (*this)(object.arguments) ||
           (object.keywords && (*this)(*object.keywords)) ||
           (object.state && (*this)(*object.state)) || any(object.list_items) ||
           any(object.dict_items);
  }

  std::unordered_set<const void*> seen_;
};

}  // namespace

bool holds_tensors(const Value& value) {
  return Search()(value);
}

nb::object object_of(const Value& value, nb::object wrap) {
  return Converter(std::move(wrap))(value);
}

}  // namespace tessera::python
