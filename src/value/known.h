// Values of classes that everybody knows: the standard library's, numpy's and torch's.
//
// A pickle says of them which class is to be called with which arguments. In the tree they are
// objects and globals, and stay so. This table tells what they mean, without calling anything.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/numpy_array.h"
#include "tessera/value.h"
#include "value/equality.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

struct KnownValue {
  std::string_view type;  // "collections.Counter"
  // As Python's repr has it, in parts: texts, and values that are written as they are.
  std::vector<std::variant<std::string, Value>> parts;
};

// nullopt: another class, arguments of which its class would not make a value, or another text than
// Python's would be. Arrays and scalars of numpy are in tessera/numpy_array.h.
[[nodiscard]] std::optional<KnownValue> known_value(const Value& value);

// Whether torch calls a dtype so: "float32", and also "quint8", which no tensor of a tree has.
[[nodiscard]] bool is_torch_dtype(std::string_view name);

// "float64" of a scalar of numpy, "ndarray" of an array.
[[nodiscard]] std::string numpy_class(const NumpyArray& array);
// As Python's repr has it, in one line and with every element, cut after about `cap` bytes:
// "array([1, 2], dtype=int32)", "np.float64(1.5)".
[[nodiscard]] std::string numpy_text(const NumpyArray& array, std::size_t cap);
// A scalar as Python's str has it: "1.5".
[[nodiscard]] std::string numpy_number(const NumpyArray& scalar);

}  // namespace tessera
#pragma GCC visibility pop

namespace tessera {

// The parts of calls that tell what they would make.

// What repr writes of a call of such a class; nullopt: the class would not make a value of it.
using KnownParts = std::optional<std::vector<std::variant<std::string, Value>>>;

// Of texts and values.
template <typename... Parts>
[[nodiscard]] KnownParts written(const Parts&... parts) {
  KnownParts made(std::in_place);
  const auto add = [&made](const auto& part) {
    if constexpr (std::same_as<std::decay_t<decltype(part)>, Value>) {
      made->emplace_back(std::in_place_type<Value>, part);
    } else {
      made->emplace_back(std::in_place_type<std::string>, part);
    }
  };
  (add(parts), ...);
  return made;
}

// The classes of the module datetime.
[[nodiscard]] KnownParts parts_of_date(const Object& object);
[[nodiscard]] KnownParts parts_of_datetime(const Object& object);
[[nodiscard]] KnownParts parts_of_time(const Object& object);
[[nodiscard]] KnownParts parts_of_timedelta(const Object& object);
[[nodiscard]] KnownParts parts_of_timezone(const Object& object);

// The arguments of a call that has nothing else; null: it has.
[[nodiscard]] const std::vector<Value>* call_arguments(const Object& object);
// An integer of 64 bits.
[[nodiscard]] std::optional<std::int64_t> small_integer(const Value& value);

// How numpy says what it is.

struct NumpyDType {
  DType dtype = DType::float32;
  bool big_endian = false;
  std::string_view code;  // as numpy has it: "f4"
};

// A dtype of booleans or numbers; nullopt: anything else.
[[nodiscard]] std::optional<NumpyDType> numpy_dtype(const Object& object);
[[nodiscard]] inline std::optional<NumpyDType> numpy_dtype(const Value& value) {
  return value.is(Value::Kind::object) ? numpy_dtype(value.as_object()) : std::nullopt;
}

// A call with a tuple of arguments, and perhaps a state.
[[nodiscard]] inline bool is_plain_call(const Object& object) {
  return object.arguments.is(Value::Kind::tuple) && !object.by_new && !object.keywords &&
         object.list_items.empty() && object.dict_items.empty();
}

[[nodiscard]] inline bool is_integer(const Value& value, std::int64_t number) {
  return value.is(Value::Kind::integer) && value.as_integer() == Integer{number, {}};
}

}  // namespace tessera
