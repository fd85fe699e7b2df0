#include "format/gguf/blocks.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "base/numbers.h"
#include "tessera/error.h"

namespace tessera::gguf {
namespace {

// By ggml's numbers. Those that are left out were types of early versions, which no program reads
// any more.
constexpr std::array kTypes = {
    ElementType{0, "F32", 1, 4, DType::float32},
    ElementType{1, "F16", 1, 2, DType::float16},
    ElementType{2, "Q4_0", 32, 18},
    ElementType{3, "Q4_1", 32, 20},
    ElementType{6, "Q5_0", 32, 22},
    ElementType{7, "Q5_1", 32, 24},
    ElementType{8, "Q8_0", 32, 34},
    ElementType{9, "Q8_1", 32, 40},
    ElementType{10, "Q2_K", 256, 84},
    ElementType{11, "Q3_K", 256, 110},
    ElementType{12, "Q4_K", 256, 144},
    ElementType{13, "Q5_K", 256, 176},
    ElementType{14, "Q6_K", 256, 210},
    ElementType{15, "Q8_K", 256, 292},
    ElementType{16, "IQ2_XXS", 256, 66},
    ElementType{17, "IQ2_XS", 256, 74},
    ElementType{18, "IQ3_XXS", 256, 98},
    ElementType{19, "IQ1_S", 256, 50},
    ElementType{20, "IQ4_NL", 32, 18},
    ElementType{21, "IQ3_S", 256, 110},
    ElementType{22, "IQ2_S", 256, 82},
    ElementType{23, "IQ4_XS", 256, 136},
    ElementType{24, "I8", 1, 1, DType::int8},
    ElementType{25, "I16", 1, 2, DType::int16},
    ElementType{26, "I32", 1, 4, DType::int32},
    ElementType{27, "I64", 1, 8, DType::int64},
    ElementType{28, "F64", 1, 8, DType::float64},
    ElementType{29, "IQ1_M", 256, 56},
    ElementType{30, "BF16", 1, 2, DType::bfloat16},
    ElementType{34, "TQ1_0", 256, 54},
    ElementType{35, "TQ2_0", 256, 66},
    ElementType{39, "MXFP4", 32, 17},
    ElementType{40, "NVFP4", 64, 36},
    ElementType{41, "Q1_0", 128, 18},
};

constexpr std::size_t kHalf = 2;       // bytes of a scale
constexpr std::size_t kElements = 32;  // of a block of each type that is decoded

float half_at(const std::byte* from) {
  return Half{load_le<_Float16>(from)};
}

void decode_q8_0(const std::byte* block, float* out) {
  const float scale = half_at(block);
  for (std::size_t i = 0; i < kElements; ++i)
    out[i] = scale * static_cast<float>(load_le<std::int8_t>(block + kHalf + i));
}

// The low four bits of the bytes are the first half of the elements.
unsigned nibble(const std::byte* bytes, std::size_t i) {
  constexpr std::size_t kFirst = kElements / 2;
  const auto both = std::to_integer<unsigned>(bytes[i % kFirst]);
  return i < kFirst ? both & 15U : both >> 4U;
}

void decode_q4_0(const std::byte* block, float* out) {
  const float scale = half_at(block);
  for (std::size_t i = 0; i < kElements; ++i)
    out[i] = scale * (static_cast<float>(nibble(block + kHalf, i)) - 8.0F);
}

void decode_q4_1(const std::byte* block, float* out) {
  const float scale = half_at(block), least = half_at(block + kHalf);
  for (std::size_t i = 0; i < kElements; ++i)
    out[i] = scale * static_cast<float>(nibble(block + 2 * kHalf, i)) + least;
}

struct Decoder {
  std::string_view type;
  void (*decode)(const std::byte* block, float* out);
};
constexpr std::array<Decoder, 3> kDecoders{
    {{"Q8_0", decode_q8_0}, {"Q4_0", decode_q4_0}, {"Q4_1", decode_q4_1}}};

}  // namespace

const ElementType& type_of(std::uint32_t id) {
  const auto* const found = std::ranges::find(kTypes, id, &ElementType::id);
  if (found == kTypes.end())
    throw Error(ErrorCode::unsupported, "elements of ggml's type " + std::to_string(id));
  return *found;
}

const ElementType* type_named(std::string_view name) {
  const auto* const found = std::ranges::find(kTypes, name, &ElementType::name);
  return found == kTypes.end() ? nullptr : found;
}

bool can_decode(const ElementType& type) {
  return std::ranges::find(kDecoders, type.name, &Decoder::type) != kDecoders.end();
}

void decode(const ElementType& type, ByteView blocks, std::span<float> out) {
  const auto* const decoder = std::ranges::find(kDecoders, type.name, &Decoder::type);
  const auto bytes = static_cast<std::size_t>(type.bytes);
  if (decoder == kDecoders.end() || blocks.size() % bytes != 0 ||
      blocks.size() / bytes * kElements != out.size()) {
    throw Error(ErrorCode::invalid_argument, std::to_string(blocks.size()) + " bytes of " +
                                                 std::string(type.name) + " for " +
                                                 std::to_string(out.size()) + " elements");
  }
  float* to = out.data();
  for (; !blocks.empty(); blocks = blocks.subspan(bytes), to += kElements)
    decoder->decode(blocks.data(), to);
}

}  // namespace tessera::gguf
