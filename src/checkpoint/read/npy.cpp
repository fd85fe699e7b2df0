#include "checkpoint/read/npy.h"

#include <algorithm>
#include <array>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/read/cast.h"

namespace tessera {
namespace {

struct NumpyType {
  DType dtype;
  std::string_view descr;
};

constexpr std::array<NumpyType, 11> kNumpyTypes{{{DType::bool8, "|b1"},
                                                 {DType::int8, "|i1"},
                                                 {DType::int16, "<i2"},
                                                 {DType::int32, "<i4"},
                                                 {DType::int64, "<i8"},
                                                 {DType::float16, "<f2"},
                                                 {DType::bfloat16, "<f4"},
                                                 {DType::float32, "<f4"},
                                                 {DType::float64, "<f8"},
                                                 {DType::complex64, "<c8"},
                                                 {DType::complex128, "<c16"}}};

// numpy's name of the type that stands for `dtype`: of those that it does not have, their bits.
std::string descr_of(DType dtype) {
  const auto* known = std::ranges::find(kNumpyTypes, dtype, &NumpyType::dtype);
  if (known != kNumpyTypes.end()) return std::string(known->descr);
  return (size_of(dtype) == 1 ? "|u" : "<u") + std::to_string(size_of(dtype));
}

// As Python prints a tuple.
std::string tuple_text(const Shape& shape) {
  std::string text = "(";
  for (const std::int64_t size : shape) text += std::to_string(size) + ", ";
  if (shape.size() > 1) text.erase(text.size() - 2);
  if (shape.size() == 1) text.pop_back();
  return text + ")";
}

std::string header_of(DType dtype, const Shape& shape) {
  std::string text = "{'descr': '" + descr_of(dtype) +
                     "', 'fortran_order': False, 'shape': " + tuple_text(shape) + ", }";
  // Magic, version and length take 10 bytes; the whole is a multiple of 64 and ends a line.
  text.append(63 - (10 + text.size()) % 64, ' ');
  text += '\n';
  const auto size = static_cast<std::uint16_t>(text.size());
  std::string head = "\x93NUMPY";
  head += '\x01';
  head += '\0';
  head += static_cast<char>(size & 0xFF);
  head += static_cast<char>(size >> 8);
  return head + text;
}

}  // namespace

NpyWriter::NpyWriter(Write write, DType dtype, const Shape& shape)
    : write_(std::move(write)), dtype_(dtype) {
  const std::string head = header_of(dtype, shape);
  write_(std::as_bytes(std::span(head.data(), head.size())));
}

void NpyWriter::add(ByteView bytes) {
  std::vector<std::byte> wide;
  if (dtype_ == DType::bfloat16) {
    wide.resize(bytes.size() * 2);
    cast(dtype_, bytes.data(), DType::float32, wide.data(),
         static_cast<std::int64_t>(bytes.size() / 2));
    bytes = wide;
  }
  write_(bytes);
}

}  // namespace tessera
