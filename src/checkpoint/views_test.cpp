// Memory that a caller hands in: strided views over one memory, and chunks of one tensor, as they
// may come. Whether two have something in common is found by a look at each byte.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "checkpoint/test_support.h"
#include "tessera/data_files.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kMemory = 4096;  // bytes
constexpr std::byte kUntouched{0xa5};
constexpr DType kTypes[] = {DType::uint8, DType::int16, DType::float32, DType::int64};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(limit));
  }

 private:
  std::mt19937_64 engine_;
};

struct View {
  DType dtype = DType::uint8;
  std::int64_t offset = 0;  // elements
  Shape sizes;
  Shape strides;
  bool operator==(const View&) const = default;

  // The places where elements begin, in the memory; row-major.
  [[nodiscard]] std::vector<std::size_t> places() const {
    std::vector<std::size_t> places;
    for (std::int64_t i = 0; i < numel(sizes); ++i) {
      std::int64_t rest = i, at = offset;
      for (std::size_t d = sizes.size(); d-- > 0; rest /= sizes[d])
        at += rest % sizes[d] * strides[d];
      places.push_back(static_cast<std::size_t>(at) * size_of(dtype));
    }
    return places;
  }
  // How often it has each byte.
  [[nodiscard]] std::map<std::size_t, int> bytes() const {
    std::map<std::size_t, int> bytes;
    for (const std::size_t place : places()) {
      for (std::size_t b = 0; b < size_of(dtype); ++b) ++bytes[place + b];
    }
    return bytes;
  }

  [[nodiscard]] Tensor over(const std::shared_ptr<Storage>& memory) const {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.shape = sizes;
    tensor.pieces.push_back({whole(sizes), memory, offset, strides, -1});
    return tensor;
  }
};

std::shared_ptr<Storage> untouched() {
  auto made = memory(kMemory);
  std::fill_n(made->data, kMemory, kUntouched);
  return made;
}

// Columns of a matrix, rows, every other element, or any strides; `least`: 0 lets elements be at
// one place.
View drawn_view(Random& random, std::int64_t least) {
  View view;
  view.dtype = kTypes[random.below(4)];
  view.offset = random.below(24);
  std::int64_t matrix = 1;
  const std::int64_t width = 2 + random.below(6);
  for (std::int64_t n = random.below(4); n > 0; --n) {
    view.sizes.push_back(random.below(12) == 0 ? 0 : 1 + random.below(5));
    view.strides.push_back(random.below(3) > 0 ? matrix : least + random.below(12));
    matrix *= width;
  }
  std::ranges::reverse(view.sizes);
  std::ranges::reverse(view.strides);
  return view;
}

bool has_twice(const View& view) {
  return std::ranges::any_of(view.bytes(), [](const auto& byte) { return byte.second > 1; });
}

bool share(const View& a, const View& b) {
  const auto of_a = a.bytes(), of_b = b.bytes();
  return std::ranges::any_of(of_a, [&](const auto& byte) { return of_b.contains(byte.first); });
}

bool may_be_filled(const std::vector<View>& views) {
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (has_twice(views[i])) return false;
    for (std::size_t k = 0; k < i; ++k) {
      if (!(views[i] == views[k]) && share(views[i], views[k])) return false;
    }
  }
  return true;
}

std::string key(std::size_t number) {
  return std::string(1, static_cast<char>('a' + number));
}

// A dense tensor of a view's kind whose bytes `seed` determines.
Tensor dense(const View& view, std::uint64_t seed) {
  Tensor tensor;
  tensor.dtype = view.dtype;
  tensor.shape = view.sizes;
  const std::size_t size = byte_size(view.dtype, view.sizes);
  Piece piece{whole(view.sizes), memory(size), 0, {}, -1};
  Random random(seed);
  for (std::size_t i = 0; i < size; ++i)
    piece.storage->data[i] = static_cast<std::byte>(random.below(100));
  tensor.pieces.push_back(std::move(piece));
  return tensor;
}

// One that is in two views has the same bytes in both.
std::uint64_t seed_of(const std::vector<View>& views, std::size_t number) {
  return static_cast<std::uint64_t>(std::ranges::find(views, views[number]) - views.begin());
}

void expect_filled(const std::vector<View>& views, const Storage& memory) {
  std::vector<std::byte> expected(kMemory, kUntouched);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const Tensor values = dense(views[i], seed_of(views, i));
    const std::byte* from = values.pieces[0].storage->data;
    for (const std::size_t place : views[i].places()) {
      std::copy_n(from, size_of(views[i].dtype), expected.data() + place);
      from += size_of(views[i].dtype);
    }
  }
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), memory.data));
}

std::string text_of(const std::vector<View>& views) {
  std::string text;
  for (const View& view : views) {
    text += std::string(to_string(view.dtype)) + " from " + std::to_string(view.offset) + " " +
            to_string(view.sizes) + to_string(view.strides) + "; ";
  }
  return text;
}

// An error or none.
std::optional<ErrorCode> outcome(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.code();
  }
  return std::nullopt;
}

class Views : public testing::Test {
 protected:
  void load(const std::vector<View>& views) {
    const bool good = may_be_filled(views);
    ++(good ? good_ : bad_);
    const auto expected = good ? std::nullopt : std::optional(ErrorCode::invalid_argument);
    const auto store = memory_store();
    Value saved = Value::dict(), wanted = Value::dict();
    const auto loaded = untouched(), read = untouched();
    std::vector<ReadRequest> requests;
    for (std::size_t i = 0; i < views.size(); ++i) {
      saved.set_item(Value(key(i)), Value(dense(views[i], seed_of(views, i))));
      wanted.set_item(Value(key(i)), Value(views[i].over(loaded)));
    }
    save(saved, store);
    const Checkpoint checkpoint = Checkpoint::open(store);
    EXPECT_EQ(outcome([&] { tessera::load(wanted, store); }), expected) << text_of(views);
    const auto read_all = [&] {
      for (std::size_t i = 0; i < views.size(); ++i) {
        const std::int64_t at =
            views[i].offset * static_cast<std::int64_t>(size_of(views[i].dtype));
        requests.push_back({key(i), TensorView::of(read->data + at, views[i].dtype, views[i].sizes,
                                                   views[i].strides)});
      }
      (void)checkpoint.read_many(requests);
    };
    EXPECT_EQ(outcome(read_all), expected) << text_of(views);
    for (const auto& memory : {loaded, read})
      good ? expect_filled(views, *memory) : expect_filled({}, *memory);
  }

  int good_ = 0, bad_ = 0;
};

TEST_F(Views, AreFilledUnlessTwoShareAByte) {
  Random random(1);
  for (int round = 0; round < 1500; ++round) {
    std::vector<View> views;
    for (std::int64_t n = 1 + random.below(4); n > 0; --n) {
      const bool tied = !views.empty() && random.below(6) == 0;
      views.push_back(tied ? views.front() : drawn_view(random, 1));
      views.back().offset += tied ? 0 : random.below(4) * 20;
    }
    load(views);
    if (HasFailure()) return;
  }
  EXPECT_GT(good_, 200);
  EXPECT_GT(bad_, 200);
}

TEST_F(Views, ColumnsOfOneMatrixAreApart) {
  std::vector<View> columns;
  for (std::int64_t c = 0; c < 10; ++c) columns.push_back({DType::int16, 2 * c, {40, 2}, {20, 1}});
  load(columns);
  columns.push_back({DType::uint8, 4 * 9 + 3, {40}, {40}});  // half of an element of the last
  load(columns);
  load({{DType::float32, 0, {4, 4}, {4, 1}}, {DType::float32, 0, {4, 2}, {4, 1}}});
  load({{DType::float32, 0, {4, 3}, {4, 1}}, {DType::float32, 2, {4, 2}, {4, 1}}});
  EXPECT_EQ(good_, 1);
  EXPECT_EQ(bad_, 3);
}

// What is only read may share all that it likes.
TEST_F(Views, AreSavedAsTheyAre) {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    const auto from = memory(kMemory);
    for (std::size_t i = 0; i < kMemory; ++i)
      from->data[i] = static_cast<std::byte>(random.below(100));
    std::vector<View> views;
    Value tree = Value::dict();
    for (std::int64_t n = 1 + random.below(3); n > 0; --n) {
      views.push_back(drawn_view(random, 0));
      tree.set_item(Value(key(views.size() - 1)), Value(views.back().over(from)));
    }
    const auto part = memory_store(), store = memory_store();
    save(tree, store);
    save_part(tree, part, 0);
    for (const Checkpoint& checkpoint : {Checkpoint::open(store), Checkpoint::open(part)}) {
      const Value loaded = checkpoint.load();
      for (std::size_t i = 0; i < views.size(); ++i) {
        const std::byte* at = loaded.at(key(i)).as_tensor().pieces.at(0).storage->data;
        for (const std::size_t place : views[i].places()) {
          ASSERT_TRUE(std::equal(at, at + size_of(views[i].dtype), from->data + place))
              << text_of(views);
          at += size_of(views[i].dtype);
        }
      }
    }
  }
}

// Pieces of a [4, 3] tensor with memory of their own, as `save` and `save_part` take them.
class Chunks : public testing::Test {
 protected:
  static Box drawn_box(Random& random) {
    Box box;
    for (const std::int64_t size : kShape) {
      const std::int64_t begin = random.below(2) == 0 ? 0 : random.below(size);
      box.offsets.push_back(begin);
      box.sizes.push_back(random.below(2) == 0 ? size - begin : random.below(size - begin + 1));
    }
    return box;
  }
  static Tensor tensor_of(const std::vector<Box>& boxes) {
    Tensor tensor = counting(kShape, boxes.at(0), 1);
    for (std::size_t i = 1; i < boxes.size(); ++i)
      tensor.pieces.push_back(counting(kShape, boxes[i], 1).pieces.at(0));
    return tensor;
  }
  // How many different boxes have each element.
  static std::vector<int> holders_of(const std::vector<Box>& boxes) {
    std::vector<int> holders(12);
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      if (std::find(boxes.begin(), boxes.begin() + static_cast<std::ptrdiff_t>(i), boxes[i]) !=
          boxes.begin() + static_cast<std::ptrdiff_t>(i)) {
        continue;
      }
      const RunSequence runs(boxes[i], kShape);
      for (std::int64_t r = 0; r < runs.size(); ++r) {
        for (std::int64_t e = 0; e < runs[r].count; ++e)
          ++holders[static_cast<std::size_t>(runs[r].global + e)];
      }
    }
    return holders;
  }
  static inline const Shape kShape{4, 3};
};

TEST_F(Chunks, ThatOverlapAreRefusedByEverySave) {
  Random random(3);
  int apart = 0, overlaps = 0, whole_ones = 0;
  for (int round = 0; round < 1500; ++round) {
    std::vector<Box> boxes;
    for (std::int64_t n = 1 + random.below(3); n > 0; --n)
      boxes.push_back(!boxes.empty() && random.below(5) == 0 ? boxes[0] : drawn_box(random));
    const std::vector<int> holders = holders_of(boxes);
    const bool overlap = std::ranges::max(holders) > 1, hole = std::ranges::min(holders) < 1;
    ++(overlap ? overlaps : hole ? apart : whole_ones);
    const Value tree = Value::dict({{"t", tensor_of(boxes)}});
    const auto part = memory_store(), store = memory_store();
    const auto saved = overlap ? std::optional(ErrorCode::conflict)
                       : hole  ? std::optional(ErrorCode::incomplete)
                               : std::nullopt;
    ASSERT_EQ(outcome([&] { save(tree, store); }), saved) << round;
    const bool is_saved = !outcome([&] { save_part(tree, part, 0); });
    ASSERT_EQ(is_saved, !overlap) << round;
    if (overlap) continue;
    ASSERT_EQ(outcome([&] { (void)Checkpoint::open(part); }), saved) << round;
    if (hole) continue;
    for (const Checkpoint& checkpoint : {Checkpoint::open(store), Checkpoint::open(part)})
      ASSERT_EQ(floats(checkpoint.load().at("t").as_tensor()),
                floats(counting(kShape, whole(kShape), 1)));
  }
  EXPECT_GT(apart, 100);
  EXPECT_GT(overlaps, 100);
  EXPECT_GT(whole_ones, 100);
}

// A piece without storage says that another rank holds it, also where there is nothing to hold.
TEST(EmptyTensor, MayBeHeldByAnotherRank) {
  Tensor empty;
  empty.shape = {0, 3};
  empty.pieces.push_back({whole(empty.shape), nullptr, 0, {}, -1});
  const Value tree = Value::dict({{"model", Value::dict({{"e", empty}})}});
  for (const CheckpointKind kind :
       {CheckpointKind::torch_file, CheckpointKind::safetensors, CheckpointKind::dcp,
        CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new, CheckpointKind::olmo_legacy}) {
    const std::string path = temporary_directory() + "/c" +
                             (kind == CheckpointKind::torch_file    ? ".pt"
                              : kind == CheckpointKind::safetensors ? ".safetensors"
                                                                    : "");
    save(tree, path, {.kind = kind});
    const Value loaded = Checkpoint::open(path).load();
    EXPECT_EQ(loaded.at("model").at("e").as_tensor().shape, empty.shape) << to_string(kind);
  }
  const std::string part = temporary_directory() + "/c";
  save_part(tree, part, 0);
  EXPECT_EQ(Checkpoint::open(part).load().at("model").at("e").as_tensor().shape, empty.shape);
}

}  // namespace
}  // namespace tessera
