#include "checkpoint/read/reader.h"

#include <random>

#include "base/crc32.h"
#include "checkpoint/test_support.h"
#include "io/testing.h"
#include "layout/plan.h"

namespace tessera {
namespace {

constexpr DType kTypes[] = {DType::uint8, DType::bfloat16, DType::float32, DType::int64,
                            DType::complex128};

// Draws tensors whose pieces lie at any strides, and knows every element by itself.
class Generator {
 public:
  explicit Generator(unsigned seed) : rng_(seed) {}

  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng_);
  }
  bool one_in(int n) { return draw(1, n) == 1; }

  Tensor tensor() {
    Tensor made;
    made.dtype = kTypes[draw(0, 4)];
    const std::int64_t longest = one_in(8) ? 700 : 20;
    for (std::int64_t d = draw(0, 4); d > 0; --d) {
      const bool long_enough = !made.shape.empty() && numel(made.shape) > 20'000;
      made.shape.push_back(draw(1, long_enough ? 3 : longest));
    }
    elements.assign(static_cast<std::size_t>(numel(made.shape)) * size_of(made.dtype), {});
    for (const Box& box : cut(whole(made.shape), draw(0, 3))) add_piece(made, box);
    return made;
  }

  // A box or a range of the shape, all of it now and then.
  Slice slice(const Shape& shape) {
    const std::int64_t count = numel(shape);
    if (one_in(3)) return whole(shape);
    if (one_in(2)) {
      const std::int64_t begin = draw(0, count - 1);
      return FlatRange{begin, draw(begin + 1, count)};
    }
    Box box;
    for (const std::int64_t size : shape) {
      box.offsets.push_back(draw(0, size - 1));
      box.sizes.push_back(draw(1, size - box.offsets.back()));
    }
    return box;
  }

  std::vector<std::byte> elements;  // of the tensor, row-major

 private:
  std::vector<Box> cut(const Box& box, std::int64_t times) {
    if (times == 0 || box.sizes.empty()) return {box};
    const auto d = static_cast<std::size_t>(draw(0, std::ssize(box.sizes) - 1));
    if (box.sizes[d] < 2) return {box};
    Box low = box;
    Box high = box;
    low.sizes[d] = draw(1, box.sizes[d] - 1);
    high.offsets[d] += low.sizes[d];
    high.sizes[d] -= low.sizes[d];
    std::vector<Box> boxes = cut(low, times - 1);
    for (Box& other : cut(high, times - 1)) boxes.push_back(std::move(other));
    return boxes;
  }

  Shape strides_for(const Shape& sizes) {
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), rng_);
    Shape strides(sizes.size());
    std::int64_t stride = one_in(4) ? draw(2, 5) : 1;
    for (const std::size_t d : order) {
      strides[d] = one_in(6) ? 0 : stride;
      stride = stride * sizes[d] + (one_in(5) ? draw(1, one_in(4) ? 3000 : 7) : 0);
    }
    return strides;
  }

  // The piece's storage gets random bytes; what its elements are follows from the strides.
  void add_piece(Tensor& tensor, const Box& box) {
    const std::size_t element = size_of(tensor.dtype);
    Piece piece{box, std::make_shared<Storage>(), draw(0, 3), strides_for(box.sizes), -1};
    if (one_in(5)) piece.strides.clear();
    const Shape strides = piece.strides.empty() ? contiguous_strides(box.sizes) : piece.strides;
    std::int64_t last = piece.storage_offset;
    for (std::size_t d = 0; d < strides.size(); ++d) last += (box.sizes[d] - 1) * strides[d];
    std::vector<std::byte> bytes(static_cast<std::size_t>(last + 1 + draw(0, 3)) * element);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng_());
    const Shape outer = contiguous_strides(tensor.shape);
    for (std::int64_t i = 0; i < numel(box.sizes); ++i) {
      std::int64_t rest = i;
      std::int64_t from = piece.storage_offset;
      std::int64_t to = 0;
      for (std::size_t d = strides.size(); d-- > 0;) {
        from += rest % box.sizes[d] * strides[d];
        to += (rest % box.sizes[d] + box.offsets[d]) * outer[d];
        rest /= box.sizes[d];
      }
      std::memcpy(elements.data() + static_cast<std::size_t>(to) * element,
                  bytes.data() + static_cast<std::size_t>(from) * element, element);
    }
    piece.storage->size = bytes.size();
    piece.storage->crc32 = crc32(bytes);
    if (one_in(4)) {
      piece.storage->owner = std::make_shared<std::vector<std::byte>>(std::move(bytes));
      piece.storage->data =
          static_cast<std::vector<std::byte>*>(piece.storage->owner.get())->data();
    } else {
      piece.storage->offset = static_cast<std::uint64_t>(draw(0, 5));
      bytes.insert(bytes.begin(), piece.storage->offset, std::byte{1});
      piece.storage->source = memory_source(std::move(bytes), "file");
    }
    tensor.pieces.push_back(std::move(piece));
  }

  std::mt19937 rng_;
};

// The elements of `target`, picked out of the whole tensor's.
std::vector<std::byte> expected_of(const Tensor& tensor, const std::vector<std::byte>& elements,
                                   const Slice& target) {
  const std::size_t element = size_of(tensor.dtype);
  std::vector<std::byte> expected(static_cast<std::size_t>(numel(target)) * element);
  const RunSequence runs(target, tensor.shape);
  for (std::int64_t r = 0; r < runs.size(); ++r) {
    const Run run = runs[r];
    std::memcpy(expected.data() + static_cast<std::size_t>(run.local) * element,
                elements.data() + static_cast<std::size_t>(run.global) * element,
                static_cast<std::size_t>(run.count) * element);
  }
  return expected;
}

TEST(TensorReader, ReadsElementsAtAnyStridesThroughAnyWindows) {
  int views = 0;
  for (unsigned seed = 0; seed < 250; ++seed) {
    Generator generator(seed);
    const Tensor tensor = generator.tensor();
    const std::size_t element = size_of(tensor.dtype);
    const auto tile = static_cast<std::size_t>(1) << generator.draw(0, 17);
    TensorReader reader(tensor, "w", tile);
    StorageChecks checks;
    for (int targets = 0; targets < 2; ++targets) {
      const Slice target = generator.slice(tensor.shape);
      const auto expected = expected_of(tensor, generator.elements, target);
      const std::int64_t count = numel(target);
      std::vector<std::byte> found(expected.size());
      const std::int64_t window = generator.one_in(2) ? count : generator.draw(1, count);
      // Now and then from somewhere in the middle.
      std::int64_t at = generator.one_in(4) ? generator.draw(0, count - 1) : 0;
      std::memcpy(found.data(), expected.data(), static_cast<std::size_t>(at) * element);
      while (at < count) {
        const std::int64_t part = std::min(window, count - at);
        const MutableByteView place = MutableByteView(found).subspan(
            static_cast<std::size_t>(at) * element, static_cast<std::size_t>(part) * element);
        reader.read(target, at, part, place.data());
        if (const ByteView there = reader.view(target, at, part); !there.empty()) {
          ++views;
          ASSERT_TRUE(std::ranges::equal(there, place)) << "seed " << seed;
        }
        at += part;
      }
      ASSERT_EQ(found, expected) << "seed " << seed << ", " << to_string(target) << " of "
                                 << to_string(tensor.shape) << " by " << window;
    }
    // Followed or read again: the storages' checksums are right either way.
    reader.hand_over(checks);
    checks.read_rest(1);
  }
  EXPECT_GT(views, 20);
}

TEST(TensorReader, ElementsAreSeenWhereTheyAreUnlessTheyStandForOthers) {
  std::vector<std::byte> bytes(48, std::byte{1});
  Tensor tensor;
  tensor.shape = {4, 3};
  const auto storage = std::make_shared<Storage>();
  storage->data = bytes.data();
  storage->size = bytes.size();
  tensor.pieces.push_back({whole(tensor.shape), storage, 0, {}, -1});
  const auto seen = [&] { return TensorReader(tensor, "w").view(whole(tensor.shape), 3, 6); };
  EXPECT_EQ(seen().data(), bytes.data() + 12);
  EXPECT_EQ(seen().size(), 24U);
  tensor.pieces[0].neg = true;
  EXPECT_TRUE(seen().empty());
  tensor.pieces[0].neg = false;
  tensor.stored = DType::bfloat16;
  EXPECT_TRUE(seen().empty());
  tensor.stored.reset();
  tensor.pieces[0].strides = {1, 4};
  EXPECT_TRUE(seen().empty());
}

struct Scattered {
  Shape shape;
  Shape strides;
};

// Requests and bytes of a reader that goes through a tensor of bytes by windows of 64 KiB.
std::pair<std::uint64_t, std::uint64_t> cost_of(const Scattered& layout, std::uint64_t size) {
  const auto source =
      std::make_shared<CountingSource>(memory_source(std::vector<std::byte>(size), "file"));
  Tensor tensor;
  tensor.dtype = DType::uint8;
  tensor.shape = layout.shape;
  auto storage = std::make_shared<Storage>();
  storage->source = source;
  storage->size = size;
  tensor.pieces.push_back({whole(layout.shape), storage, 0, layout.strides, -1});
  TensorReader reader(tensor, "w", 1 << 20);
  std::vector<std::byte> window(64 << 10);
  const std::int64_t count = numel(tensor.shape);
  for (std::int64_t at = 0; at < count; at += std::ssize(window)) {
    reader.read(whole(tensor.shape), at, std::min(std::ssize(window), count - at), window.data());
  }
  return {source->calls(), source->bytes()};
}

TEST(TensorReader, GoesOverAFileOncePerTileAndNotOncePerElement) {
  constexpr std::uint64_t kSize = 8 << 20;
  const Scattered transposed{{2048, 4096}, {1, 2048}};
  const Scattered channels_last{{128, 64, 32, 32}, {65536, 1, 2048, 64}};
  const Scattered every_other{{4096, 1024}, {2048, 2}};
  const Scattered expanded{{8, 1024, 1024}, {0, 1, 1024}};
  const Scattered repeated{{1 << 20, 8}, {0, 1}};
  // A tile is 256 rows: 4096 runs of the file each.
  EXPECT_LE(cost_of(transposed, kSize).first, 8U * 4096);
  // Neighbouring runs are read together, gaps and all, at most once a tile.
  EXPECT_LE(cost_of(channels_last, kSize).first, 200U);
  EXPECT_LE(cost_of(channels_last, kSize).second, 2 * kSize);
  EXPECT_LE(cost_of(every_other, kSize).first, 200U);
  EXPECT_LE(cost_of(every_other, kSize).second, kSize + (1U << 20));
  EXPECT_LE(cost_of(expanded, 1 << 20).first, 200U);
  EXPECT_LE(cost_of(repeated, 8).first, 600U);
}

}  // namespace
}  // namespace tessera
