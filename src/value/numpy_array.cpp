#include "tessera/numpy_array.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "tessera/tensor_view.h"
#include "value/known.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::size_t kMostDimensions = 64;  // that numpy has

// Which numpy calls "f4", or "c8" for two of them.
struct Code {
  std::string_view text;
  DType dtype;
};
constexpr auto kCodes = std::to_array<Code>({{"b1", DType::bool8},
                                             {"i1", DType::int8},
                                             {"i2", DType::int16},
                                             {"i4", DType::int32},
                                             {"i8", DType::int64},
                                             {"u1", DType::uint8},
                                             {"u2", DType::uint16},
                                             {"u4", DType::uint32},
                                             {"u8", DType::uint64},
                                             {"f2", DType::float16},
                                             {"f4", DType::float32},
                                             {"f8", DType::float64},
                                             {"c8", DType::complex64},
                                             {"c16", DType::complex128}});

struct Layout {
  Shape shape;
  Shape strides;
};

// The sizes; nullopt: they are none, or an array of numpy cannot be that large.
std::optional<Shape> shape_of_array(const Value& value) {
  if (!value.is(Kind::tuple) || value.size() > kMostDimensions) return std::nullopt;
  Shape shape;
  std::int64_t elements = 1;  // without regard to sizes of 0, as numpy counts
  for (const Value& item : value.items()) {
    if (!item.is(Kind::integer) || !item.as_integer().big.empty()) return std::nullopt;
    const std::int64_t size = item.as_integer().small;
    if (size < 0 || __builtin_mul_overflow(elements, std::max<std::int64_t>(size, 1), &elements))
      return std::nullopt;
    shape.push_back(size);
  }
  // Sixteen bytes are the longest element.
  return elements > (INT64_MAX >> 4) ? std::nullopt : std::optional(std::move(shape));
}

// Elements of one row stand next to each other.
std::optional<Layout> by_rows(const Value& sizes) {
  auto shape = shape_of_array(sizes);
  if (!shape) return std::nullopt;
  Shape strides = contiguous_strides(*shape);
  return Layout{*std::move(shape), std::move(strides)};
}

// Those of one column do.
std::optional<Layout> by_columns(const Value& sizes) {
  auto layout = by_rows(sizes);
  if (!layout) return std::nullopt;
  std::int64_t stride = 1;
  for (std::size_t d = 0; d < layout->shape.size(); ++d) {
    layout->strides[d] = stride;
    stride *= std::max<std::int64_t>(layout->shape[d], 1);
  }
  return layout;
}

// As numpy.transpose(axes) of what has `sizes` by rows; nullopt: `axes` does not name each
// dimension once.
std::optional<Layout> transposed(const Value& sizes, const Value& axes) {
  const auto memory = by_rows(sizes);
  if (!memory || !axes.is(Kind::tuple) || axes.size() != memory->shape.size()) return std::nullopt;
  Layout layout;
  std::vector<bool> taken(axes.size(), false);
  for (const Value& axis : axes.items()) {
    const auto dim = small_integer(axis);
    if (!dim || *dim < 0 || std::cmp_greater_equal(*dim, taken.size())) return std::nullopt;
    const auto at = static_cast<std::size_t>(*dim);
    if (taken[at]) return std::nullopt;
    taken[at] = true;
    layout.shape.push_back(memory->shape[at]);
    layout.strides.push_back(memory->strides[at]);
  }
  return layout;
}

// Each number from its last byte to its first; a complex one is two.
std::vector<std::byte> turned_around(std::vector<std::byte> bytes, DType dtype) {
  const bool is_complex = is_one_of(dtype, DType::complex64, DType::complex128);
  const auto size = static_cast<std::ptrdiff_t>(size_of(dtype) / (is_complex ? 2 : 1));
  for (auto at = bytes.begin(); at != bytes.end(); at += size) std::reverse(at, at + size);
  return bytes;
}

// The tensor of these elements; nullopt: the bytes are not as many as they need.
std::optional<Tensor> tensor_of_bytes(const Value& content, const NumpyDType& dtype,
                                      const std::optional<Layout>& layout) {
  if (!layout || !is_one_of(content.kind(), Kind::bytes, Kind::bytearray)) return std::nullopt;
  if (content.as_bytes().size() != byte_size(dtype.dtype, layout->shape)) return std::nullopt;
  auto owner = std::make_shared<Value>(
      dtype.big_endian ? Value::bytes(turned_around(content.as_bytes(), dtype.dtype)) : content);
  // Of a tensor in memory the bytes may be written, which is nobody's business here.
  auto* const bytes = const_cast<std::byte*>(owner->as_bytes().data());
  Tensor tensor = TensorView::of(bytes, dtype.dtype, layout->shape, layout->strides).tensor();
  tensor.pieces.front().storage->owner = std::move(owner);
  return tensor;
}

// _reconstruct(ndarray, (0,), b'b') with the state (version, shape, dtype, by columns, bytes).
std::optional<Tensor> reconstructed(const Object& object) {
  const auto& given = object.arguments.items();
  if (given.size() != 3 || !is_global(given[0], "numpy", "ndarray") || !object.state ||
      !object.state->is(Kind::tuple) || object.state->size() != 5)
    return std::nullopt;
  const auto& state = object.state->items();
  const auto dtype = numpy_dtype(state[2]);
  if (!is_integer(state[0], 1) || !dtype || !state[3].is(Kind::boolean)) return std::nullopt;
  return tensor_of_bytes(state[4], *dtype,
                         state[3].as_bool() ? by_columns(state[1]) : by_rows(state[1]));
}

// By rows, by columns or, since numpy 2.4, in another order of dimensions: "C", "F", "K" with axes.
std::optional<Layout> layout_of_buffer(const Value::List& given) {
  if (given.size() == 4 && is_text(given[3], "C")) return by_rows(given[2]);
  if (given.size() == 4 && is_text(given[3], "F")) return by_columns(given[2]);
  if (given.size() == 5 && is_text(given[3], "K")) return transposed(given[2], given[4]);
  return std::nullopt;
}

// _frombuffer(bytes, dtype, shape, 'C'), since pickles of protocol 5.
std::optional<Tensor> from_buffer(const Object& object) {
  const auto& given = object.arguments.items();
  const auto layout = layout_of_buffer(given);
  const auto dtype = layout && !object.state ? numpy_dtype(given[1]) : std::nullopt;
  return dtype ? tensor_of_bytes(given[0], *dtype, layout) : std::nullopt;
}

// scalar(dtype, bytes)
std::optional<Tensor> of_scalar(const Object& object) {
  const auto& given = object.arguments.items();
  if (given.size() != 2 || object.state || !given[1].is(Kind::bytes)) return std::nullopt;
  const auto dtype = numpy_dtype(given[0]);
  if (!dtype) return std::nullopt;
  return tensor_of_bytes(given[1], *dtype, Layout{});
}

// The state is (3, '<', None, None, None, -1, -1, 0): the three are of records and of arrays
// inside. Null: it is another one.
const std::string* order_of_bytes(const Object& dtype) {
  if (!dtype.state || !dtype.state->is(Kind::tuple) || dtype.state->size() != 8) return nullptr;
  const auto& state = dtype.state->items();
  for (const std::size_t part : {2, 3, 4})
    if (!state[part].is(Kind::none)) return nullptr;
  return state[1].is(Kind::string) ? &state[1].as_string() : nullptr;
}

// A function of numpy's private module, which has had two names.
bool is_of_multiarray(const Value& callable, std::string_view name) {
  return is_global(callable, "numpy._core.multiarray", name) ||
         is_global(callable, "numpy.core.multiarray", name);
}

}  // namespace

std::optional<NumpyDType> numpy_dtype(const Object& object) {
  if (!is_global(object.callable, "numpy", "dtype") || !is_plain_call(object)) return std::nullopt;
  const std::string* order = order_of_bytes(object);
  const auto& given = object.arguments.items();
  if (order == nullptr || given.empty() || !given[0].is(Kind::string)) return std::nullopt;
  const auto* code = std::ranges::find(kCodes, given[0].as_string(), &Code::text);
  if (code == kCodes.end()) return std::nullopt;
  const bool has_order = size_of(code->dtype) > 1;
  const bool is_known = *order == "<" || *order == ">" || *order == "=";
  if (!is_known && (*order != "|" || has_order)) return std::nullopt;
  return NumpyDType{code->dtype, has_order && *order == ">", code->text};
}

std::optional<NumpyArray> numpy_array(const Value& value) {
  if (!value.is(Kind::object)) return std::nullopt;
  const Object& object = value.as_object();
  if (!object.callable.is(Kind::global) || !is_plain_call(object)) return std::nullopt;
  std::optional<Tensor> tensor;
  const bool is_scalar = is_of_multiarray(object.callable, "scalar");
  if (is_scalar) {
    tensor = of_scalar(object);
  } else if (is_of_multiarray(object.callable, "_reconstruct")) {
    tensor = reconstructed(object);
  } else if (is_global(object.callable, "numpy._core.numeric", "_frombuffer") ||
             is_global(object.callable, "numpy.core.numeric", "_frombuffer")) {
    tensor = from_buffer(object);
  }
  if (!tensor) return std::nullopt;
  return NumpyArray{std::move(*tensor), is_scalar};
}

}  // namespace tessera
