// What a caller's tree says of its memory, and what is touched of it (issue 15, 7.1).
#include "checkpoint/read/memory.h"

#include <algorithm>
#include <random>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kGuard = 64;  // bytes on either side of a storage
constexpr std::byte kUntouched{0xA5};

// A storage between guards, all of it kUntouched.
struct Guarded {
  explicit Guarded(std::size_t of) : size(of), bytes(of + 2 * kGuard, kUntouched) {}

  [[nodiscard]] std::shared_ptr<Storage> storage() {
    auto made = std::make_shared<Storage>();
    made->data = bytes.data() + kGuard;
    made->size = size;
    return made;
  }

  std::size_t size;
  std::vector<std::byte> bytes;
};

int between(std::mt19937& random, int low, int high) {
  return std::uniform_int_distribution(low, high)(random);
}

// A random piece, mostly of a sensible layout, sometimes of a wild one.
struct Case {
  Tensor tensor;
  std::vector<std::int64_t> positions;  // of its elements in the storage, in row-major order
  bool readable = true;
  bool writable = true;
};

// Counts through the array of sizes and strides.
std::vector<std::int64_t> positions_of(const Shape& sizes, const Shape& strides,
                                       std::int64_t first) {
  std::vector<std::int64_t> positions{first};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    std::vector<std::int64_t> more;
    for (const std::int64_t at : positions) {
      for (std::int64_t i = 0; i < sizes[d]; ++i) more.push_back(at + i * strides[d]);
    }
    positions = std::move(more);
  }
  return positions;
}

// Whether the elements are at places of their own.
bool is_apart(std::vector<std::int64_t> positions) {
  std::sort(positions.begin(), positions.end());
  return std::adjacent_find(positions.begin(), positions.end()) == positions.end();
}

Case random_case(std::mt19937& random) {
  static constexpr DType kTypes[] = {DType::uint8, DType::bfloat16, DType::float32, DType::int64};
  Case made;
  Tensor& tensor = made.tensor;
  tensor.dtype = kTypes[between(random, 0, 3)];
  Box box;
  for (int d = between(random, 0, 3); d > 0; --d) {
    tensor.shape.push_back(between(random, 0, 5));
    box.offsets.push_back(between(random, 0, static_cast<int>(tensor.shape.back())));
    box.sizes.push_back(between(random, 0, 5));
    made.readable = made.readable && box.offsets.back() + box.sizes.back() <= tensor.shape.back();
  }
  Piece piece{box, nullptr, between(random, 0, 4), {}, -1};
  if (between(random, 0, 9) == 0) piece.storage_offset = -between(random, 1, 3);
  Shape strides = contiguous_strides(box.sizes);
  if (between(random, 0, 1) == 0) {
    std::shuffle(strides.begin(), strides.end(), random);
    for (std::int64_t& stride : strides) stride += between(random, 0, 2);
    if (!strides.empty() && between(random, 0, 5) == 0) strides[0] = between(random, -2, 0);
    piece.strides = strides;
  }
  made.positions = positions_of(box.sizes, strides, piece.storage_offset);
  const auto needed = made.positions.empty()
                          ? 0
                          : *std::max_element(made.positions.begin(), made.positions.end()) + 1;
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t bytes = std::max<std::int64_t>(0, needed * element + between(random, -2, 2));
  piece.storage = std::make_shared<Storage>();
  piece.storage->size = static_cast<std::uint64_t>(bytes);
  if (!made.positions.empty()) {
    const auto negative = [](std::int64_t n) { return n < 0; };
    made.readable = made.readable && piece.storage_offset >= 0 &&
                    std::none_of(strides.begin(), strides.end(), negative) &&
                    needed * element <= bytes;
    made.writable = is_apart(made.positions);
  }
  made.writable = made.writable && made.readable;
  tensor.pieces.push_back(std::move(piece));
  return made;
}

TEST(Memory, APieceIsTakenExactlyWhenItLiesInItsStorage) {
  std::mt19937 random(1);
  int taken = 0;
  for (int round = 0; round < 5000; ++round) {
    Case of = random_case(random);
    std::byte somewhere{};
    of.tensor.pieces[0].storage->data = &somewhere;
    const auto accepts = [&](auto proof) {
      try {
        proof(of.tensor, "key");
        return true;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
        EXPECT_EQ(error.key(), "key");
        return false;
      }
    };
    EXPECT_EQ(accepts(require_readable), of.readable) << round;
    EXPECT_EQ(accepts(require_writable), of.writable) << round;
    taken += of.writable ? 1 : 0;
  }
  EXPECT_GT(taken, 500);
  EXPECT_LT(taken, 4500);
}

// Cases that are taken go through a save and a load: every element arrives at its place, and no
// other byte is touched.
TEST(Memory, NothingBesideTheElementsIsReadOrWritten) {
  std::mt19937 random(2);
  std::vector<Case> cases;
  while (cases.size() < 300) {
    Case of = random_case(random);
    of.tensor.shape = std::get<Box>(of.tensor.pieces[0].slice).sizes;  // a save needs the whole
    std::get<Box>(of.tensor.pieces[0].slice).offsets.assign(of.tensor.shape.size(), 0);
    if (of.writable) cases.push_back(std::move(of));
  }
  std::vector<Guarded> from;
  std::vector<Guarded> to;
  Value saved = Value::dict();
  Value loaded = Value::dict();
  for (Case& of : cases) {
    const auto size = static_cast<std::size_t>(of.tensor.pieces[0].storage->size);
    from.emplace_back(size);
    for (std::size_t i = 0; i < size; ++i)
      from.back().bytes[kGuard + i] = static_cast<std::byte>(between(random, 0, 255));
    to.emplace_back(size);
    const std::string key = "t" + std::to_string(to.size());
    of.tensor.pieces[0].storage = from.back().storage();
    saved.set_item(Value(key), Value(of.tensor));
    of.tensor.pieces[0].storage = to.back().storage();
    loaded.set_item(Value(key), Value(of.tensor));
  }
  const std::string directory = temporary_directory() + "/c";
  save(saved, directory, *solo_group());
  load(loaded, directory, *solo_group());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::size_t element = size_of(cases[i].tensor.dtype);
    std::vector<std::byte> expected(to[i].bytes.size(), kUntouched);
    for (const std::int64_t position : cases[i].positions) {
      const auto at = kGuard + static_cast<std::size_t>(position) * element;
      std::copy_n(from[i].bytes.begin() + static_cast<std::ptrdiff_t>(at), element,
                  expected.begin() + static_cast<std::ptrdiff_t>(at));
    }
    EXPECT_EQ(to[i].bytes, expected) << i;
  }
}

// A tree with one float tensor of `shape`, whose one piece is all of it in `bytes` bytes.
Value tree_of(const Shape& shape, std::size_t bytes) {
  Tensor tensor;
  tensor.shape = shape;
  tensor.pieces.push_back({whole(shape), memory(bytes), 0, {}, -1});
  return Value::dict({{"w", std::move(tensor)}});
}

TEST(Memory, TheRefusalNamesTheKeyAndBothNumbers) {
  const std::string directory = temporary_directory() + "/c";
  const Value right = tree_of({8}, 32);
  save(right, directory, *solo_group());
  Value wrong = tree_of({8}, 8);
  for (const Error& error : {error_of([&] { load(wrong, directory, *solo_group()); }),
                             error_of([&] { save(wrong, directory + "2", *solo_group()); })}) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.key(), "w");
    EXPECT_EQ(error.message(), "a piece reaches to byte 32 of a storage of 8 bytes");
  }
  EXPECT_FALSE(std::filesystem::exists(directory + "2"));
}

TEST(Memory, WhatIsNowhereIsRefused) {
  const std::string directory = temporary_directory() + "/c";
  save(tree_of({8}, 32), directory, *solo_group());
  Value tree = tree_of({8}, 32);
  tree.at("w").as_tensor().pieces[0].storage->data = nullptr;
  for (const Error& error : {error_of([&] { load(tree, directory, *solo_group()); }),
                             error_of([&] { save(tree, directory + "2", *solo_group()); })}) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.key(), "w");
  }
  Value held_elsewhere = tree_of({8}, 32);
  Tensor tensor = held_elsewhere.at("w").as_tensor();
  tensor.pieces[0].storage = nullptr;
  held_elsewhere.set_item("w", Value(tensor));
  EXPECT_EQ(code_of([&] { save(held_elsewhere, directory + "2", *solo_group()); }),
            ErrorCode::incomplete);
}

TEST(Memory, ABoxOutsideOfTheShapeIsNotDamageOfTheFile) {  // issue 15, 7.5
  const std::string directory = temporary_directory() + "/c";
  save(tree_of({8}, 32), directory, *solo_group());
  Tensor tensor = tree_of({8}, 32).at("w").as_tensor();
  tensor.pieces[0].slice = Box{{4}, {8}};
  Value tree = Value::dict({{"w", tensor}});
  EXPECT_EQ(code_of([&] { load(tree, directory, *solo_group()); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { save(tree, directory + "2", *solo_group()); }),
            ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
