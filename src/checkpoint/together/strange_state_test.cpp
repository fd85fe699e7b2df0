// Live saves of the OLMo kinds whose tensors are no plain arrays: drawn from seeds, saved by some
// ranks, and read back bit for bit, whole and into the strided memory of other ranks.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <stop_token>

#include "base/crc32.h"
#include "checkpoint/test_support.h"
#include "layout/boxes.h"
#include "tessera/verify.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

using namespace testing_support;

constexpr CheckpointKind kStrangeKinds[] = {
    CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new, CheckpointKind::olmo_legacy,
    CheckpointKind::olmo_local};
constexpr DType kStrangeTypes[] = {DType::float32, DType::bfloat16,  DType::float64,
                                   DType::int8,    DType::int64,     DType::bool8,
                                   DType::uint8,   DType::complex64, DType::complex128};

// A tensor, as all ranks know it.
struct Strange {
  std::string name;
  DType dtype = DType::float32;
  Shape shape;
  Placement placement;
  unsigned seed = 0;
  bool conj = false;
  bool neg = false;
  std::vector<bool> expanded;      // dimensions along which all elements are one
  std::vector<std::size_t> order;  // of dimensions in memory, the innermost first
  std::int64_t gap = 1;            // between elements
};

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  std::int64_t operator()(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution(low, high)(random_);
  }
  bool one_in(int n) { return (*this)(1, n) == 1; }

  Strange strange(int number, int ranks, CheckpointKind kind) {
    const bool local = kind == CheckpointKind::olmo_local;
    Strange made;
    made.name = "m" + std::to_string(number) + ".w";
    made.seed = static_cast<unsigned>((*this)(0, 1 << 30));
    made.dtype = local ? (one_in(2) ? DType::float32 : DType::bfloat16)
                       : kStrangeTypes[(*this)(0, std::ssize(kStrangeTypes) - 1)];
    for (std::int64_t d = (*this)(local ? 1 : 0, 3); d > 0; --d)
      made.shape.push_back(!local && one_in(12) ? 0 : (*this)(1, 6));
    made.placement = placement(made.shape, ranks, local);
    made.conj = made.dtype == DType::complex64 && one_in(2);
    made.neg = made.dtype != DType::bool8 && one_in(3);
    for (std::size_t d = 0; d < made.shape.size(); ++d) {
      made.expanded.push_back(!local && one_in(5));
      made.order.insert(made.order.begin() + (*this)(0, std::ssize(made.order)), d);
    }
    made.gap = one_in(3) ? 2 : 1;
    return made;
  }

 private:
  Placement placement(const Shape& shape, int ranks, bool local) {
    if (local) {
      const std::int64_t aligned = (numel(shape) + ranks - 1) / ranks * ranks;
      return ranks == 1 ? Placement{} : Placement{ranks, 1, 0, aligned / ranks, 0};
    }
    if (shape.empty() || ranks == 1 || one_in(4)) return {};
    const auto dim = static_cast<int>((*this)(0, std::ssize(shape) - 1));
    if (ranks == 4 && one_in(3)) return {.parts = 2, .stride = one_in(2) ? 2 : 1, .dim = dim};
    return {.parts = ranks, .dim = dim};
  }

  std::mt19937 random_;
};

// The bytes of the element at a global position.
void element_of(const Strange& strange, std::int64_t position, std::byte* out) {
  std::int64_t same = 0;  // the position with 0 for what is expanded
  std::int64_t stride = 1;
  for (std::size_t d = strange.shape.size(); d-- > 0; stride *= strange.shape[d]) {
    if (!strange.expanded[d]) same += position / stride % strange.shape[d] * stride;
  }
  std::minstd_rand random(strange.seed + static_cast<unsigned>(same) * 977U + 1U);
  for (std::size_t i = 0; i < size_of(strange.dtype); ++i) out[i] = std::byte(random() >> 7U);
  if (strange.dtype == DType::bool8) out[0] &= std::byte{1};
}

std::vector<std::byte> elements_of(const Strange& strange) {
  const std::size_t element = size_of(strange.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel(strange.shape)) * element);
  for (std::int64_t i = 0; i < numel(strange.shape); ++i)
    element_of(strange, i, bytes.data() + static_cast<std::size_t>(i) * element);
  return bytes;
}

Shape strides_in_memory(const Strange& strange, const Shape& sizes, bool expands) {
  Shape strides(sizes.size());
  std::int64_t stride = strange.gap;
  for (const std::size_t d : strange.order) {
    strides[d] = expands && strange.expanded[d] ? 0 : stride;
    stride *= strange.expanded[d] && expands ? 1 : std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

// `visit(position of the element in the tensor, place in the piece's memory)`.
template <typename Visit>
void each_element(const Box& box, const Shape& shape, const Shape& strides, const Visit& visit) {
  const Shape outer = contiguous_strides(shape);
  for (std::int64_t i = 0; i < numel(box.sizes); ++i) {
    std::int64_t rest = i, position = 0, place = 0;
    for (std::size_t d = box.sizes.size(); d-- > 0; rest /= box.sizes[d]) {
      position += (rest % box.sizes[d] + box.offsets[d]) * outer[d];
      place += rest % box.sizes[d] * strides[d];
    }
    visit(position, place);
  }
}

// What a rank has of it; zeros, without lazy bits and in memory of its own, to load into.
Tensor part_in_memory(const Strange& strange, const Placement& placement, int rank, bool to_load) {
  Tensor tensor;
  tensor.dtype = strange.dtype;
  tensor.shape = strange.shape;
  tensor.sharded = placement.parts > 1;
  tensor.placement = placement;
  const std::size_t element = size_of(strange.dtype);
  const int part = part_of_rank(placement, rank);
  for (const Box& box : boxes_of_part(placement, strange.shape, part)) {
    const Shape strides = strides_in_memory(strange, box.sizes, !to_load);
    std::int64_t last = 0;
    for (std::size_t d = 0; d < strides.size(); ++d)
      last += std::max<std::int64_t>(box.sizes[d] - 1, 0) * strides[d];
    constexpr std::int64_t kOffset = 3;
    Piece piece{box, memory(static_cast<std::size_t>(kOffset + last + 1) * element), kOffset,
                strides, rank};
    piece.conj = strange.conj && !to_load;
    piece.neg = strange.neg && !to_load;
    each_element(box, strange.shape, strides, [&](std::int64_t position, std::int64_t place) {
      std::byte* at = piece.storage->data + static_cast<std::size_t>(kOffset + place) * element;
      if (to_load) return;
      element_of(strange, position, at);
      resolve_bits(piece, strange.dtype, at, 1);  // its own inverse
    });
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

void expect_loaded(const Strange& strange, const Tensor& tensor) {
  const std::size_t element = size_of(strange.dtype);
  for (const Piece& piece : tensor.pieces) {
    each_element(std::get<Box>(piece.slice), strange.shape, piece.strides,
                 [&](std::int64_t position, std::int64_t place) {
                   std::vector<std::byte> expected(element);
                   element_of(strange, position, expected.data());
                   const std::byte* at =
                       piece.storage->data +
                       static_cast<std::size_t>(piece.storage_offset + place) * element;
                   ASSERT_TRUE(std::equal(expected.begin(), expected.end(), at)) << strange.name;
                 });
  }
}

// The same model, some of it under two names, with containers that hold little.
Value strange_state(const std::vector<Strange>& tensors, int rank) {
  Value model = Value::dict({}, DictKind::ordered_dict);
  Value states = Value::dict();
  Value names = Value::list();
  for (const Strange& strange : tensors) {
    model.set_item(strange.name, part_in_memory(strange, strange.placement, rank, false));
    names.items().emplace_back(strange.name);
    states.set_item(
        strange.name,
        Value::dict({{"exp_avg", part_in_memory(strange, strange.placement, rank, false)}}));
  }
  Value group = Value::dict({{"lr", 0.5}, {"params", names}, {"param_names", names}});
  group.set_item("nothing", Value::dict());
  group.set_item("no list", Value::list());
  group.set_item("none", Value());
  Value train = Value::dict({{"global_step", 3}, {"empty", Value::dict()}});
  train.set_item(Value(7), Value::dict({{Value(-1), Value("by number")}}));
  return Value::dict(
      {{"model", model},
       {"optim", Value::dict({{"state", states}, {"param_groups", Value::list({group})}})},
       {"train", train}});
}

SaveOptions strange_options(CheckpointKind kind, const std::vector<Strange>& tensors) {
  SaveOptions options;
  options.kind = kind;
  options.olmo.units = {{"", {}}};
  for (const Strange& strange : tensors)
    options.olmo.units.push_back({strange.name.substr(0, strange.name.find('.')), {strange.name}});
  return options;
}

void expect_read(const std::vector<Strange>& tensors, const std::string& path) {
  EXPECT_TRUE(verify(path).findings.empty());
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StateDigests digests = saved_digests(*posix_store(path));
  for (const Strange& strange : tensors) {
    const std::vector<std::byte> expected = elements_of(strange);
    std::vector<std::byte> found(expected.size());
    checkpoint.read("model." + strange.name,
                    TensorView::of(found.data(), strange.dtype, strange.shape));
    EXPECT_EQ(found, expected) << strange.name;
    EXPECT_EQ(digests.at("model." + strange.name), crc32(expected)) << strange.name;
  }
  const Value tree = checkpoint.load();
  const Value& group = tree.at("optim").at("param_groups").at(std::size_t{0});
  EXPECT_TRUE(group.at("nothing").is(Value::Kind::dict));
  EXPECT_TRUE(group.at("no list").is(Value::Kind::list));
  EXPECT_TRUE(group.at("none").is(Value::Kind::none));
  const Value* by_number = tree.at("train").find_key(Value(7));
  ASSERT_NE(by_number, nullptr);
  EXPECT_EQ(by_number->find_key(Value(-1))->as_string(), "by number");
}

// The load is by rows, on other ranks.
void expect_loads(const std::vector<Strange>& tensors, const std::string& path, int ranks) {
  run_ranks(ranks, [&](Group& group) {
    Value model = Value::dict();
    for (const Strange& strange : tensors) {
      const Placement rows{.parts = strange.shape.empty() ? 1 : ranks};
      model.set_item(strange.name, part_in_memory(strange, rows, group.rank(), true));
    }
    Value tree = Value::dict({{"model", model}});
    load(tree, path, group);
    for (const Strange& strange : tensors)
      expect_loaded(strange, model.at(strange.name).as_tensor());
  });
}

TEST(StrangeStates, AreSavedBitForBitByAnyRanks_OQ05) {
  constexpr int kWorlds[] = {1, 2, 3, 4, 8};
  for (unsigned seed = 0; seed < 40; ++seed) {
    Draw draw(seed);
    const CheckpointKind kind = kStrangeKinds[seed % 4];
    const int ranks = kWorlds[seed / 4 % 5];
    SCOPED_TRACE(std::string(to_string(kind)) + " by " + std::to_string(ranks) + ", seed " +
                 std::to_string(seed));
    std::vector<Strange> tensors;
    for (int i = 0; i < 6; ++i) tensors.push_back(draw.strange(i, ranks, kind));
    const TemporaryDirectory directory;
    const std::string path = directory.path() + "/step4";
    run_ranks(ranks, [&](Group& group) {
      (void)save(strange_state(tensors, group.rank()), path, strange_options(kind, tensors), group);
    });
    expect_read(tensors, path);
    expect_loads(tensors, path, kWorlds[(seed + 2) % 3]);
  }
}

// The types in the side file have them: `.metadata` has no entry for an empty dict.
TEST(StrangeStates, EmptyDictsComeBackFromDcpToo) {
  const std::string path = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    const Value tree = Value::dict({{"first", Value::dict()},
                                    {"w", counting({4}, chunk({4}, group.rank(), 2), 0)},
                                    {"in", Value::list({Value::dict(), 5, Value::dict()})}});
    (void)save(tree, path, group);
  });
  const Value tree = Checkpoint::open(path).load();
  EXPECT_EQ(tree.pairs().at(0).first.as_string(), "first");
  EXPECT_EQ(tree.at("first").size(), 0U);
  ASSERT_EQ(tree.at("in").size(), 3U);
  EXPECT_TRUE(tree.at("in").at(std::size_t{2}).is(Value::Kind::dict));
}

TEST(StrangeStates, AWeightWithTwoNamesIsThereUnderBoth) {
  for (const CheckpointKind kind :
       {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new, CheckpointKind::olmo_legacy}) {
    const std::string path = temporary_directory() + "/step4";
    const auto tied = [](Group& group, float first) {
      Tensor rows = counting({5, 2}, chunk({5, 2}, group.rank(), 2), first, first > 0);
      rows.placement = Placement{.parts = 2};
      const Value weight(std::move(rows));
      return Value::dict(
          {{"model", Value::dict({{"wte.weight", weight}, {"head.weight", weight}})}});
    };
    run_ranks(2, [&](Group& group) {
      SaveOptions options;
      options.kind = kind;
      const Value saved = tied(group, 7);
      (void)save(saved, path, options, group);
      Value loaded = tied(group, 0);
      load(loaded, path, group);
      EXPECT_EQ(floats(loaded.at("model").at("head.weight").as_tensor()),
                floats(saved.at("model").at("wte.weight").as_tensor()));
    });
    const StateDigests digests = saved_digests(*posix_store(path));
    EXPECT_EQ(digests.at("model.wte.weight"), digests.at("model.head.weight"));
  }
}

// What SIGINT asks for, on one rank alone.
TEST(StrangeStates, ARankThatIsToStopEndsTheSaveOfAllAndTheOldOneStays) {
  std::vector<Strange> tensors;
  for (int i = 0; i < 4; ++i) {
    Strange& made = tensors.emplace_back();
    made.name = "m" + std::to_string(i) + ".w";
    made.shape = {128, 1024};
    made.expanded = {true, true};
    made.order = {1, 0};
    made.placement = {2, 1, 0, 64 * 1024, 0};
  }
  for (const CheckpointKind kind : kStrangeKinds) {
    SCOPED_TRACE(to_string(kind));
    const TemporaryDirectory directory;
    const std::string path = directory.path() + "/step4";
    const auto save_by_two = [&](int stopping) {
      run_ranks(2, [&](Group& group) {
        std::stop_source source;
        SaveOptions options = strange_options(kind, tensors);
        options.overwrite = true;
        options.threads = 1;
        options.stop = source.get_token();
        options.progress = [&](const Progress&) {
          if (group.rank() == stopping) source.request_stop();
        };
        (void)save(strange_state(tensors, group.rank()), path, options, group);
      });
    };
    save_by_two(-1);
    const std::string id = text_of(path + "/tessera-state.json");
    for (const int rank : {0, 1})
      EXPECT_EQ(code_of([&] { save_by_two(rank); }), ErrorCode::cancelled);
    EXPECT_EQ(text_of(path + "/tessera-state.json"), id);
    EXPECT_TRUE(verify(path).findings.empty());
    const auto entries = std::filesystem::directory_iterator(directory.path());
    EXPECT_EQ(std::distance(begin(entries), end(entries)), 1);
  }
}

}  // namespace
}  // namespace tessera
