#include "checkpoint/read/dequantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/numbers.h"
#include "base/process.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/reader.h"
#include "format/gguf/gguf.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::int64_t kBlock = 128;      // rows and columns that share a scale
constexpr std::int64_t kStep = 64 << 10;  // elements computed at once
constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kWeightScale = ".weight_scale_inv";
constexpr std::string_view kBlocks = "_blocks";
constexpr std::string_view kScales = "_scales";

std::vector<float> scale_values(DType dtype, std::span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / size_of(dtype));
  if (is_small_float(dtype)) {
    const auto table = float8_values(dtype);
    std::transform(bytes.begin(), bytes.end(), values.begin(),
                   [&table](std::byte byte) { return table[std::to_integer<std::size_t>(byte)]; });
  } else {
    cast(dtype, bytes.data(), DType::float32, reinterpret_cast<std::byte*>(values.data()),
         static_cast<std::int64_t>(values.size()));
  }
  return values;
}

// Elements of a tensor that are computed from those of another, and of its scales if these are a
// tensor of their own. The bytes of both that carry a checksum are checked when the last element
// has been read.
class Computed : public ByteSource {
 public:
  // `scales`: null: there are none.
  Computed(const Leaf& quantized, const Leaf* scales, std::int64_t count, DType to)
      : quantized_(quantized.value), count_(count), to_(to), name_(quantized.name) {
    if (scales != nullptr) {
      scales_ = scales->value;
      scales_name_ = scales->name;
    }
    (void)readers();  // refuses what cannot be read
  }

  [[nodiscard]] std::uint64_t size() const override {
    return checked_mul<std::uint64_t>(static_cast<std::uint64_t>(count_), size_of(to_));
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    const auto element = static_cast<std::uint64_t>(size_of(to_));
    if (offset > size() || out.size() > size() - offset)
      throw Error(ErrorCode::incomplete, "elements behind the last one").at_path(name_);
    Readers& readers = this->readers();
    const std::lock_guard lock(readers.mutex);
    std::vector<float> values;
    std::vector<std::byte> raw;
    while (!out.empty()) {
      const auto begin = static_cast<std::int64_t>(offset / element);
      const std::uint64_t skip = offset % element;
      const std::int64_t want =
          static_cast<std::int64_t>((skip + out.size() + element - 1) / element);
      const std::int64_t count = std::min(want, kStep);
      values.resize(static_cast<std::size_t>(count));
      compute(begin, values);
      raw.resize(static_cast<std::size_t>(count) * element);
      cast(DType::float32, reinterpret_cast<const std::byte*>(values.data()), to_, raw.data(),
           count);
      const std::size_t part = std::min<std::size_t>(raw.size() - skip, out.size());
      std::memcpy(out.data(), raw.data() + skip, part);
      out = out.subspan(part);
      offset += part;
    }
    if (offset == size()) readers.compare_checksums();
  }

 protected:
  // Fills `out` with the elements from `begin` on.
  virtual void compute(std::int64_t begin, std::span<float> out) const = 0;

  // Row-major ranges of the two tensors.
  std::vector<std::byte> elements(std::int64_t begin, std::int64_t count) const {
    std::vector<std::byte> bytes(static_cast<std::size_t>(count));
    readers().elements.read(whole(quantized_.as_tensor().shape), begin, count, bytes.data());
    return bytes;
  }
  std::vector<float> scales(std::int64_t begin, std::int64_t count) const {
    const Tensor& tensor = scales_.as_tensor();
    std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(tensor.dtype));
    readers().scales->read(whole(tensor.shape), begin, count, bytes.data());
    return scale_values(tensor.dtype, bytes);
  }

 private:
  struct Readers {
    Readers(const Value& quantized, const std::string& name, const Value& by,
            const std::string& by_name)
        : elements(quantized.as_tensor(), name) {
      if (by.is(Value::Kind::tensor)) scales.emplace(by.as_tensor(), by_name);
    }

    void compare_checksums() {
      elements.hand_over(checks);
      if (scales) scales->hand_over(checks);
      checks.read_rest(1);
    }

    std::mutex mutex;  // guards what follows
    TensorReader elements;
    std::optional<TensorReader> scales;
    StorageChecks checks;  // of both tensors
  };
  [[nodiscard]] Readers& readers() const {
    return readers_.get(
        [this] { return std::make_unique<Readers>(quantized_, name_, scales_, scales_name_); });
  }

  Value quantized_;
  Value scales_;  // none: there are none
  std::string scales_name_;
  std::int64_t count_;
  DType to_;
  std::string name_;
  PerProcess<Readers> readers_;
};

// Scales that have been read: of neighbouring blocks in one row of blocks.
struct KnownScales {
  std::int64_t row = -1;
  std::int64_t first = 0;
  std::vector<float> values;

  [[nodiscard]] bool cover(std::int64_t of_row, std::int64_t from, std::int64_t to) const {
    return of_row == row && from >= first && to < first + static_cast<std::int64_t>(values.size());
  }
};

class BlockScaled final : public Computed {
 public:
  BlockScaled(const Leaf& weight, const Leaf& scales, DType to)
      : Computed(weight, &scales, numel(weight.value.as_tensor().shape), to),
        columns_(weight.value.as_tensor().shape[1]),
        values_(float8_values(weight.value.as_tensor().dtype)) {}

 private:
  void compute(std::int64_t begin, std::span<float> out) const override {
    const auto count = static_cast<std::int64_t>(out.size());
    const std::vector<std::byte> bytes = elements(begin, count);
    const std::int64_t scale_columns = (columns_ + kBlock - 1) / kBlock;
    KnownScales known;
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t row = (begin + done) / columns_;
      const std::int64_t column = column_of(begin + done);
      const std::int64_t run = std::min(count - done, columns_ - column);
      const std::int64_t first = column / kBlock;
      const std::int64_t last = (column + run - 1) / kBlock;
      const std::int64_t row_of_blocks = row / kBlock;
      if (!known.cover(row_of_blocks, first, last)) {
        known = {row_of_blocks, first,
                 scales(row_of_blocks * scale_columns + first, last - first + 1)};
      }
      const std::int64_t end = done + run;
      for (std::int64_t block = first; done < end; ++block) {
        const float scale = known.values[static_cast<std::size_t>(block - known.first)];
        const std::int64_t stop =
            std::min(end, done + (block + 1) * kBlock - column_of(begin + done));
        for (; done < stop; ++done) {
          const auto byte = std::to_integer<std::size_t>(bytes[static_cast<std::size_t>(done)]);
          out[static_cast<std::size_t>(done)] = values_[byte] * scale;
        }
      }
    }
  }

  [[nodiscard]] std::int64_t column_of(std::int64_t element) const { return element % columns_; }

  std::int64_t columns_;
  std::array<float, 256> values_;
};

// Two values a byte, the low nibble first; a scale, the exponent of a power of two, for the values
// of the last dimension of the blocks.
class Mxfp4 final : public Computed {
 public:
  Mxfp4(const Leaf& blocks, const Leaf& scales, DType to)
      : Computed(blocks, &scales,
                 checked_mul<std::int64_t>(numel(blocks.value.as_tensor().shape), 2), to),
        group_(blocks.value.as_tensor().shape.back()),
        as_bytes_(scales.value.as_tensor().dtype == DType::uint8),
        powers_(float8_values(DType::float8_e8m0fnu)) {}

 private:
  void compute(std::int64_t begin, std::span<float> out) const override {
    const auto count = static_cast<std::int64_t>(out.size());
    const std::int64_t first = begin / 2;
    const std::int64_t end = (begin + count + 1) / 2;
    const std::vector<std::byte> bytes = elements(first, end - first);
    const std::int64_t first_group = first / group_;
    const std::vector<float> known = powers(first_group, (end - 1) / group_ - first_group + 1);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t byte = (begin + i) / 2;
      const auto both = std::to_integer<unsigned>(bytes[static_cast<std::size_t>(byte - first)]);
      const unsigned nibble = (begin + i) % 2 == 0 ? both & 15U : both >> 4U;
      const float power = known[static_cast<std::size_t>(byte / group_ - first_group)];
      out[static_cast<std::size_t>(i)] = kFloat4Values[nibble] * power;
    }
  }

  std::vector<float> powers(std::int64_t begin, std::int64_t count) const {
    std::vector<float> values = scales(begin, count);
    if (!as_bytes_) return values;
    for (float& value : values) value = powers_[static_cast<std::size_t>(value)];
    return values;
  }

  std::int64_t group_;  // bytes that share a scale
  bool as_bytes_;       // the scales are float8_e8m0fnu by another name
  std::array<float, 256> powers_;
};

// Blocks of GGUF, which have their scales in them.
class GgufBlocks final : public Computed {
 public:
  GgufBlocks(const Leaf& blocks, const gguf::ElementType& type, std::int64_t count, DType to)
      : Computed(blocks, nullptr, count, to), type_(type) {}

 private:
  void compute(std::int64_t begin, std::span<float> out) const override {
    const std::int64_t end = begin + static_cast<std::int64_t>(out.size());
    const std::int64_t first = begin / type_.elements;
    const std::int64_t count = (end + type_.elements - 1) / type_.elements - first;
    std::vector<float> values(static_cast<std::size_t>(count * type_.elements));
    gguf::decode(type_, elements(first * type_.bytes, count * type_.bytes), values);
    std::copy_n(values.begin() + (begin - first * type_.elements), out.size(), out.begin());
  }

  const gguf::ElementType& type_;
};

[[noreturn]] void refuse(ErrorCode code, const Leaf& quantized, const Leaf& scales,
                         const std::string& why) {
  const auto text = [](const Leaf& leaf) {
    const Tensor& tensor = leaf.value.as_tensor();
    return std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape);
  };
  throw Error(code, text(quantized) + " with scales " + text(scales) + ": " + why)
      .at_key(quantized.name);
}

// The path without the last `count` bytes of its last step, if that is a key of so many.
Path shortened(Path path, std::size_t count) {
  const auto* last = path.empty() ? nullptr : std::get_if<std::string>(&path.back());
  if (last != nullptr && last->size() >= count) path.back() = last->substr(0, last->size() - count);
  return path;
}

Leaf computed_leaf(std::string name, Shape shape, DType to, std::shared_ptr<Computed> source,
                   const Leaf& from) {
  auto storage = std::make_shared<Storage>();
  storage->size = source->size();
  storage->dtype = to;
  storage->source = std::move(source);
  Tensor tensor;
  tensor.dtype = to;
  tensor.shape = std::move(shape);
  tensor.pieces.push_back(Piece{whole(tensor.shape), std::move(storage), 0, {}, -1});
  Path path = shortened(from.path, from.name.size() - name.size());
  return {std::move(name), std::move(path), Value(std::move(tensor)), from.containers};
}

bool is_scale_type(DType dtype) {
  return is_small_float(dtype) || can_cast(dtype, DType::float32);
}

constexpr std::int64_t blocks_in(std::int64_t size) {
  return size / kBlock + (size % kBlock != 0 ? 1 : 0);
}

Leaf block_scaled(const Leaf& weight, const Leaf& scales, DType to) {
  const Tensor& tensor = weight.value.as_tensor();
  const Tensor& scale = scales.value.as_tensor();
  if (!is_small_float(tensor.dtype) || !is_scale_type(scale.dtype)) {
    refuse(ErrorCode::unsupported, weight, scales, "expected float8 and floating point");
  }
  if (tensor.shape.size() != 2 ||
      scale.shape != Shape{blocks_in(tensor.shape[0]), blocks_in(tensor.shape[1])}) {
    refuse(ErrorCode::mismatch, weight, scales, "expected a scale for every block of 128 x 128");
  }
  return computed_leaf(weight.name, tensor.shape, to,
                       std::make_shared<BlockScaled>(weight, scales, to), weight);
}

bool holds_pairs(DType dtype) {
  return dtype == DType::uint8 || dtype == DType::float4_e2m1fn_x2;
}

bool holds_exponents(DType dtype) {
  return dtype == DType::uint8 || dtype == DType::float8_e8m0fnu;
}

// The shape of the groups that share a scale.
Shape groups_of(const Shape& blocks) {
  return Shape(blocks.begin(), blocks.end() - 1);
}

void require_mxfp4(const Leaf& blocks, const Leaf& scales) {
  const Tensor& tensor = blocks.value.as_tensor();
  const Tensor& scale = scales.value.as_tensor();
  if (!holds_pairs(tensor.dtype) || !holds_exponents(scale.dtype))
    refuse(ErrorCode::unsupported, blocks, scales, "expected bytes");
  if (tensor.shape.size() < 2 || tensor.shape.back() == 0 || scale.shape != groups_of(tensor.shape))
    refuse(ErrorCode::mismatch, blocks, scales, "expected a scale for every last dimension");
}

// Blocks of experts lie as [expert, out, in], and the parameter of that name is [expert, in, out]
// in transformers: a view, or a square weight would be loaded the wrong way around without an
// error.
void turn_around(Tensor& tensor) {
  if (tensor.shape.size() != 3) return;
  const std::int64_t rows = tensor.shape[1];
  const std::int64_t columns = tensor.shape[2];
  tensor.shape = {tensor.shape[0], columns, rows};
  Piece& piece = tensor.pieces.front();
  piece.slice = whole(tensor.shape);
  piece.strides = {checked_mul(rows, columns), 1, columns};
}

Leaf mxfp4(const Leaf& blocks, const Leaf& scales, DType to) {
  require_mxfp4(blocks, scales);
  const Tensor& tensor = blocks.value.as_tensor();
  Shape shape = groups_of(tensor.shape);
  shape.back() =
      checked_mul(checked_mul<std::int64_t>(shape.back(), tensor.shape.back()), std::int64_t{2});
  Leaf leaf =
      computed_leaf(blocks.name.substr(0, blocks.name.size() - kBlocks.size()), std::move(shape),
                    to, std::make_shared<Mxfp4>(blocks, scales, to), blocks);
  turn_around(leaf.value.as_tensor());
  return leaf;
}

Leaf gguf_blocks(const Leaf& blocks, const std::string& name, DType to) {
  const gguf::ElementType* const type = gguf::type_named(name);
  if (type == nullptr || !gguf::can_decode(*type)) {
    throw Error(ErrorCode::unsupported, "blocks of type " + printable(name, 60) +
                                            " are not dequantized; without --dequantize they are "
                                            "copied as they are")
        .at_key(blocks.name);
  }
  const Tensor& tensor = blocks.value.as_tensor();
  if (tensor.dtype != DType::uint8 || tensor.shape.empty() ||
      tensor.shape.back() % type->bytes != 0) {
    throw Error(ErrorCode::mismatch, std::string(to_string(tensor.dtype)) + " " +
                                         to_string(tensor.shape) +
                                         ", expected bytes in blocks of " +
                                         std::to_string(type->bytes) + " (" + name + ")")
        .at_key(blocks.name);
  }
  Shape shape = tensor.shape;
  shape.back() = checked_mul(shape.back() / type->bytes, type->elements);
  const std::int64_t count = numel(shape);
  return computed_leaf(blocks.name, std::move(shape), to,
                       std::make_shared<GgufBlocks>(blocks, *type, count, to), blocks);
}

// Quantized tensors and their scales or types, which go by each other's names.
class Pairs {
 public:
  explicit Pairs(const std::vector<Leaf>& leaves) {
    for (const Leaf& leaf : leaves) {
      if (leaf.value.is(Value::Kind::tensor)) tensors_.emplace(leaf.name, &leaf);
      if (leaf.value.is(Value::Kind::string)) texts_.emplace(leaf.name, &leaf);
    }
  }

  [[nodiscard]] bool is_scale(const Leaf& leaf) const {
    return is_type(leaf) || partner(leaf, kWeightScale, kWeight) != nullptr ||
           partner(leaf, kScales, kBlocks) != nullptr;
  }

  // The leaf itself, when it is no quantized tensor.
  [[nodiscard]] Leaf dequantized(const Leaf& leaf, DType to) const {
    if (const Leaf* scales = partner(leaf, kWeight, kWeightScale))
      return block_scaled(leaf, *scales, to);
    if (const Leaf* exponents = partner(leaf, kBlocks, kScales)) return mxfp4(leaf, *exponents, to);
    if (const std::string* type = type_of(leaf)) return gguf_blocks(leaf, *type, to);
    return leaf;
  }

 private:
  // The other half of a pair: the leaf whose name has another ending.
  [[nodiscard]] const Leaf* partner(const Leaf& leaf, std::string_view ending,
                                    std::string_view other) const {
    if (!leaf.name.ends_with(ending) || !tensors_.contains(leaf.name)) return nullptr;
    const std::string name = leaf.name.substr(0, leaf.name.size() - ending.size());
    const auto found = tensors_.find(name + std::string(other));
    return found == tensors_.end() ? nullptr : found->second;
  }

  // The type of a tensor's blocks, as a GGUF file says it; null: none.
  [[nodiscard]] const std::string* type_of(const Leaf& leaf) const {
    if (!tensors_.contains(leaf.name)) return nullptr;
    const auto found = texts_.find(type_prefix() + leaf.name);
    return found == texts_.end() ? nullptr : &found->second->value.as_string();
  }
  [[nodiscard]] bool is_type(const Leaf& leaf) const {
    const std::string prefix = type_prefix();
    return texts_.contains(leaf.name) && leaf.name.starts_with(prefix) &&
           tensors_.contains(std::string_view(leaf.name).substr(prefix.size()));
  }
  static std::string type_prefix() { return std::string(gguf::kTypesDict) + "."; }

  std::unordered_map<std::string_view, const Leaf*> tensors_;
  std::unordered_map<std::string_view, const Leaf*> texts_;  // strings
};

void require_target(DType to) {
  if (!info(to).floating || !can_cast(DType::float32, to)) {
    throw Error(ErrorCode::invalid_argument,
                "weights are not dequantized into " + std::string(to_string(to)));
  }
}

}  // namespace

std::vector<Leaf> dequantized(const std::vector<Leaf>& leaves, DType to) {
  require_target(to);
  const Pairs pairs(leaves);
  std::vector<Leaf> result;
  std::unordered_set<std::string> names;
  for (const Leaf& leaf : leaves) {
    if (pairs.is_scale(leaf)) continue;
    result.push_back(pairs.dequantized(leaf, to));
    if (!names.insert(result.back().name).second) {
      throw Error(ErrorCode::conflict, "a dequantized tensor and another one have this name")
          .at_key(result.back().name);
    }
  }
  return result;
}

}  // namespace tessera
