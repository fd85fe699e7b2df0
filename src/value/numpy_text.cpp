// Arrays and scalars of numpy as text, declared in known.h.
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/numbers.h"
#include "base/text.h"
#include "tessera/numpy_array.h"
#include "value/known.h"
#include "value/render.h"

namespace tessera {
namespace {

// The shortest text that reads back as the same number, which has this precision at most.
template <typename Same>
std::string shortest_of(float value, int precision, Same is_same) {
  std::array<char, 40> buffer{};
  for (int digits = 1;; ++digits) {
    const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                   std::chars_format::scientific, digits - 1);
    double read = 0;
    std::from_chars(buffer.data(), end.ptr, read);
    // The digits in the form that Python gives a double.
    if (digits == precision || is_same(read)) return render_real(read);
  }
}

std::string narrow_text(float value, int precision, bool is_half) {
  if (!std::isfinite(value)) return render_real(static_cast<double>(value));
  return shortest_of(value, precision, [value, is_half](double read) {
    const auto back = static_cast<float>(read);
    return is_half ? static_cast<float>(Half::from(back)) == value : back == value;
  });
}

template <typename T>
std::string integer_text(const std::byte* at) {
  return std::to_string(load_le<T>(at));
}

// The parts of a complex number have no point where they are whole.
std::string complex_part(std::string text) {
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

std::string whole_number(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::int8:
      return integer_text<std::int8_t>(at);
    case DType::int16:
      return integer_text<std::int16_t>(at);
    case DType::int32:
      return integer_text<std::int32_t>(at);
    case DType::uint8:
      return integer_text<std::uint8_t>(at);
    case DType::uint16:
      return integer_text<std::uint16_t>(at);
    case DType::uint32:
      return integer_text<std::uint32_t>(at);
    case DType::uint64:
      return integer_text<std::uint64_t>(at);
    default:
      return integer_text<std::int64_t>(at);
  }
}

std::string floating_number(DType dtype, const std::byte* at) {
  if (dtype == DType::float16) return narrow_text(load_le<Half>(at), 5, true);
  if (dtype == DType::float32) return narrow_text(load_le<float>(at), 9, false);
  return render_real(load_le<double>(at));
}

std::string element_of(DType dtype, const std::byte* at) {
  if (dtype == DType::bool8) return *at == std::byte{0} ? "False" : "True";
  if (is_one_of(dtype, DType::complex64, DType::complex128)) {
    const DType part = dtype == DType::complex64 ? DType::float32 : DType::float64;
    const std::string real = complex_part(floating_number(part, at));
    const std::string imaginary = complex_part(floating_number(part, at + size_of(part))) + 'j';
    if (real == "0") return imaginary;  // as Python has it; -0 is told
    return real + (imaginary.starts_with('-') ? "" : "+") + imaginary;
  }
  return info(dtype).floating ? floating_number(dtype, at) : whole_number(dtype, at);
}

class ArrayText {
 public:
  ArrayText(const Tensor& tensor, std::size_t cap)
      : tensor_(tensor), piece_(tensor.pieces.front()), cap_(cap) {}

  std::string run() && {
    add(0, 0);
    return std::move(text_);
  }

 private:
  // What begins with element `first` of the array's memory and has the dimensions from `dim` on.
  void add(std::size_t dim, std::int64_t first) {
    if (dim == tensor_.shape.size()) {
      text_ += element(first);
      return;
    }
    text_ += '[';
    for (std::int64_t i = 0; i < tensor_.shape[dim] && text_.size() <= cap_; ++i) {
      if (i > 0) text_ += ", ";
      add(dim + 1, first + i * piece_.strides[dim]);
    }
    text_ += ']';
  }

  [[nodiscard]] std::string element(std::int64_t index) const {
    const auto offset = static_cast<std::size_t>(index) * size_of(tensor_.dtype);
    return element_of(tensor_.dtype, piece_.storage->data + offset);
  }

  const Tensor& tensor_;
  const Piece& piece_;
  std::size_t cap_;
  std::string text_;
};

// Types that an array has whose elements do not say which.
bool is_default(DType dtype) {
  return is_one_of(dtype, DType::bool8, DType::int64, DType::float64, DType::complex128);
}

}  // namespace

std::string numpy_class(const NumpyArray& array) {
  if (!array.is_scalar) return "ndarray";
  const DType dtype = array.tensor.dtype;
  return dtype == DType::bool8 ? "bool" : std::string(to_string(dtype));
}

std::string numpy_number(const NumpyArray& scalar) {
  return ArrayText(scalar.tensor, 0).run();
}

std::string numpy_text(const NumpyArray& array, std::size_t cap) {
  const Tensor& tensor = array.tensor;
  std::string text = ArrayText(tensor, cap).run();
  if (array.is_scalar)
    return tensor.dtype == DType::bool8 ? "np." + text + '_'
                                        : "np." + numpy_class(array) + '(' + text + ')';
  const bool is_empty = numel(tensor.shape) == 0;
  if (is_empty) text = "[]";
  if (is_empty && tensor.shape.size() > 1) {
    text += ", shape=(";
    for (const std::int64_t size : tensor.shape) text += std::to_string(size) + ", ";
    text.resize(text.size() - 2);
    text += ')';
  }
  if (is_empty || !is_default(tensor.dtype))
    text += ", dtype=" + std::string(to_string(tensor.dtype));
  return "array(" + text + ')';
}

}  // namespace tessera
