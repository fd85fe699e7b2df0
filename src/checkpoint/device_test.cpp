// Tensors on a device are saved and loaded like those of the host: the same bytes, in every kind.
#include <algorithm>
#include <random>

#include "checkpoint/load/fill.h"
#include "checkpoint/read/gather.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/test_support.h"
#include "conformance/fake_device.h"
#include "layout/strided.h"
#include "value/children.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

constexpr std::pair<const char*, CheckpointKind> kKinds[] = {
    {"a", CheckpointKind::dcp},
    {"a.pt", CheckpointKind::torch_file},
    {"a.safetensors", CheckpointKind::safetensors},
};

// A tensor of the host with random bytes, at strides if there are any, `first` elements into its
// storage.
Tensor random_tensor(DType dtype, const Shape& shape, const Shape& strides = {},
                     std::int64_t first = 0) {
  thread_local std::mt19937 random(7);  // ranks are threads
  const Shape at = strides.empty() ? contiguous_strides(shape) : strides;
  const auto elements = static_cast<std::size_t>(first + strided_reach(shape, at) + 1);
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.pieces.push_back({whole(shape), memory(elements * size_of(dtype)), first, strides, -1});
  Storage& storage = *tensor.pieces[0].storage;
  storage.dtype = dtype;
  for (std::size_t i = 0; i < storage.size; ++i) {
    const auto byte = static_cast<unsigned>(random());
    storage.data[i] = static_cast<std::byte>(dtype == DType::bool8 ? byte & 1 : byte & 0x3F);
  }
  return tensor;
}

Tensor lazy(Tensor tensor, bool conj, bool neg) {
  tensor.pieces[0].conj = conj;
  tensor.pieces[0].neg = neg;
  return tensor;
}

// Layouts and types of all sorts, some of them several windows long.
Value host_tree() {
  const Tensor transposed = random_tensor(DType::float32, {700, 900}, {1, 700}, 5);
  Tensor parts = random_tensor(DType::bfloat16, {4, 300});
  parts.pieces = {parts.pieces[0], parts.pieces[0]};
  parts.pieces[0].slice = Box{{0, 0}, {1, 300}};
  parts.pieces[1].slice = Box{{1, 0}, {3, 300}};
  parts.pieces[1].storage_offset = 300;
  return Value::dict(
      {{"dense", random_tensor(DType::float32, {900, 1000}, {}, 3)},
       {"bf16", random_tensor(DType::bfloat16, {33, 7})},
       {"bool", random_tensor(DType::bool8, {1001})},
       {"empty", random_tensor(DType::float32, {0, 3})},
       {"scalar", random_tensor(DType::float64, {})},
       {"transposed", transposed},
       {"other", random_tensor(DType::int16, {300, 200}, {2 * 450, 2}, 1)},
       {"channels_last", random_tensor(DType::float16, {4, 8, 30, 30}, {7200, 1, 240, 8})},
       {"expanded", random_tensor(DType::int32, {50, 20}, {0, 1})},
       {"conj", lazy(random_tensor(DType::complex64, {40, 3}, {1, 40}), true, false)},
       {"neg", lazy(random_tensor(DType::float32, {500}), false, true)},
       {"parts", parts},
       {"nested", Value::list({random_tensor(DType::uint8, {20}), 3})},
       {"inner", Value::tuple({random_tensor(DType::float32, {9, 11}), "text"})}});
}

// A tree whose storages are on a device, with the bytes that they have on the host.
class OnDevice {
 public:
  explicit OnDevice(const Value& host) {
    tree = copy_tree(host, [&](const Value& node) -> std::optional<Value> {
      if (!node.is(Value::Kind::tensor)) return std::nullopt;
      Tensor tensor = node.as_tensor();
      for (Piece& piece : tensor.pieces) piece.storage = moved(piece.storage);
      return Value(std::move(tensor));
    });
  }

  std::shared_ptr<Storage> moved(const std::shared_ptr<Storage>& storage) {
    auto& made = moved_[storage];
    if (made) return made;
    made = std::make_shared<Storage>(*storage);
    made->data = nullptr;
    made->device =
        std::make_shared<FakeMemory>(*device, MutableByteView(storage->data, storage->size));
    return made;
  }

  std::unique_ptr<FakeDevice> device = std::make_unique<FakeDevice>();
  Value tree;

 private:
  std::map<std::shared_ptr<Storage>, std::shared_ptr<Storage>> moved_;
};

// All files, by name without what differs between two saves, with their bytes.
std::map<std::string, std::string> data_of(const std::string& path) {
  namespace fs = std::filesystem;
  if (!fs::exists(path)) return {};  // a save that failed leaves no directory that it has made
  if (!fs::is_directory(path)) return {{"", text_of(path)}};
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".distcp")) files[name.substr(0, name.rfind('_'))] = text_of(entry.path());
  }
  return files;
}

TEST(Device, SavesTheSameBytesAsFromTheHost_R16) {
  const Value host = host_tree();
  OnDevice gpu(host);
  for (const auto& [name, kind] : kKinds) {
    const std::string root = temporary_directory();
    Value from = host;
    Value same = gpu.tree;
    if (kind == CheckpointKind::safetensors) {
      for (Value* tree : {&from, &same}) {
        *tree = tree->clone();
        tree->erase("conj");  // a complex type that the format lacks
      }
    }
    std::filesystem::create_directory(root + "/host");
    std::filesystem::create_directory(root + "/device");
    save(from, root + "/host/" + name);
    save(same, root + "/device/" + name);
    EXPECT_TRUE(data_of(root + "/host/" + name) == data_of(root + "/device/" + name)) << name;
    EXPECT_TRUE(verify(root + "/device/" + name).findings.empty());
    EXPECT_EQ(gpu.device->open(), 0);
    EXPECT_EQ(gpu.device->window_bytes(), 0U);
  }
  // Two threads, each with two windows of 1 MiB.
  EXPECT_LE(gpu.device->most_window_bytes(), std::size_t{4} << 20);
}

TEST(Device, CompressesTheSameBytesAsFromTheHost_R16) {
  const Value host = host_tree();
  OnDevice gpu(host);
  const std::string root = temporary_directory();
  const SaveOptions options{.compression = Compression::zstd};
  save(host, root + "/host", options);
  save(gpu.tree, root + "/device", options);
  EXPECT_TRUE(data_of(root + "/host") == data_of(root + "/device"));
  EXPECT_TRUE(verify(root + "/device").findings.empty());
  EXPECT_EQ(gpu.device->open(), 0);
  EXPECT_LE(gpu.device->most_window_bytes(), std::size_t{4} << 20);
}

// A function of the save converts (checkpoint-rows P-20).
TEST(Device, ConvertsTheSameAsFromTheHost_R16) {
  const Value host = host_tree();
  OnDevice gpu(host);
  const std::string root = temporary_directory();
  const SaveOptions options{.dtype = [](const std::string&, const Tensor& tensor) {
    return tensor.dtype == DType::float32 ? DType::bfloat16 : tensor.dtype;
  }};
  save(host, root + "/host", options);
  save(gpu.tree, root + "/device", options);
  EXPECT_TRUE(data_of(root + "/host") == data_of(root + "/device"));
  const Checkpoint saved = Checkpoint::open(root + "/device");
  EXPECT_EQ(saved.tensor("dense").dtype, DType::bfloat16);
  // As a load converts what was saved as it is.
  save(host, root + "/plain");
  const Shape shape = {900, 1000};
  std::vector<std::uint16_t> found(900'000), expected(900'000);
  saved.read("dense", TensorView::of(found.data(), DType::bfloat16, shape));
  Checkpoint::open(root + "/plain")
      .read("dense", TensorView::of(expected.data(), DType::bfloat16, shape));
  EXPECT_TRUE(found == expected);
  EXPECT_EQ(gpu.device->open(), 0);
}

// The tensors of `tree` as types that they can be cast to, in other memory: empty.
Tensor to_fill(const Tensor& of, DType dtype) {
  Tensor made = random_tensor(dtype, of.shape);
  made.pieces = of.pieces;
  std::map<std::shared_ptr<Storage>, std::shared_ptr<Storage>> storages;
  for (Piece& piece : made.pieces) {
    auto& storage = storages[piece.storage];
    if (!storage) storage = memory(piece.storage->size / size_of(of.dtype) * size_of(dtype));
    std::fill_n(storage->data, storage->size, std::byte{0xA5});
    piece.storage = storage;
  }
  return made;
}

Value to_fill(const Value& tree, bool casts) {
  Value made = Value::dict();
  for (const auto& [key, value] : tree.pairs()) {
    if (!value.is(Value::Kind::tensor) || key.as_string() == "expanded") continue;
    const DType dtype = value.as_tensor().dtype;
    const bool floating = info(dtype).floating && casts;
    made.set_item(key, to_fill(value.as_tensor(), !floating                 ? dtype
                                                  : dtype == DType::float32 ? DType::bfloat16
                                                                            : DType::float32));
  }
  return made;
}

// All bytes of the storages, also those between the elements.
std::map<std::string, std::vector<std::byte>> bytes_of(const Value& tree) {
  std::map<std::string, std::vector<std::byte>> bytes;
  for (const auto& [key, value] : tree.pairs()) {
    const Storage& storage = *value.as_tensor().pieces.at(0).storage;
    bytes[key.as_string()] = {storage.data, storage.data + storage.size};
  }
  return bytes;
}

TEST(Device, LoadsTheSameBytesAsOnTheHost) {
  const Value saved = host_tree();
  const std::string root = temporary_directory();
  for (const auto& [name, kind] : kKinds) {
    Value given = saved.clone();
    if (kind == CheckpointKind::safetensors) given.erase("conj");
    save(given, root + "/" + name);
    for (const bool casts : {false, true}) {
      Value host = to_fill(given, casts);
      const Value behind = to_fill(given, casts);
      OnDevice gpu(behind);
      LoadOptions options;
      options.allow_cast = casts;
      load(host, root + "/" + name, options);
      load(gpu.tree, root + "/" + name, options);
      const auto expected = bytes_of(host);
      for (const auto& [key, bytes] : bytes_of(behind))
        EXPECT_TRUE(bytes == expected.at(key)) << name << " " << key << " " << casts;
      EXPECT_EQ(gpu.device->open(), 0);
    }
  }
}

TEST(Device, ScatterWritesTheElementsAndNothingElse) {
  std::mt19937 random(3);
  const auto below = [&](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  for (int round = 0; round < 300; ++round) {
    Shape sizes;
    for (std::int64_t d = below(4); d >= 0; --d) sizes.push_back(1 + below(40));
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Shape strides(sizes.size());
    std::int64_t stride = 1 + below(2);
    for (const std::size_t d : order) {
      strides[d] = stride;
      stride = stride * sizes[d] + (below(3) == 0 ? below(9) : 0);
    }
    const std::size_t element = std::size_t{1} << below(4);
    std::vector<std::byte> in(static_cast<std::size_t>(numel(sizes)) * element);
    for (std::byte& byte : in) byte = static_cast<std::byte>(random());
    std::vector<std::byte> found(static_cast<std::size_t>(stride + 3) * element, std::byte{0xA5});
    std::vector<std::byte> expected = found;
    const std::byte* next = in.data();
    for_each_strided_run(sizes, strides, 0, numel(sizes), [&](std::int64_t at, std::int64_t count) {
      const std::size_t size = static_cast<std::size_t>(count) * element;
      std::memcpy(expected.data() + static_cast<std::size_t>(at + 2) * element, next, size);
      next += size;
    });
    GatherScratch scratch;
    std::size_t written = 0;
    const auto write = [&](std::span<ReadRange> ranges) {
      for (const ReadRange& range : ranges) {
        std::ranges::copy(range.out, found.begin() + static_cast<std::ptrdiff_t>(range.offset));
        written += range.out.size();
      }
    };
    scatter(move_of(whole(sizes), strides, contiguous_strides(sizes), 0), element, 2 * element,
            in.data(), write, scratch);
    ASSERT_TRUE(found == expected) << round << " " << to_string(sizes) << to_string(strides);
    ASSERT_EQ(written, in.size());
  }
}

// A transposed piece goes to the device in long runs, not an element at a time.
TEST(Device, TransposedPiecesTakeFewCopies) {
  const Value saved = Value::dict({{"w", random_tensor(DType::float32, {1500, 2000})}});
  const std::string path = temporary_directory() + "/c";
  save(saved, path);
  Value behind = Value::dict({{"w", random_tensor(DType::float32, {1500, 2000}, {1, 1500})}});
  OnDevice gpu(behind);
  load(gpu.tree, path);
  EXPECT_LE(gpu.device->copies(), 2 * 12);  // windows of 12 MB
  const int before = gpu.device->copies();
  save(gpu.tree, path + "2");
  EXPECT_LE(gpu.device->copies() - before, 3 * 12);
  EXPECT_TRUE(data_of(path) == data_of(path + "2"));
}

TEST(Device, RanksOnDevicesShareWork) {
  const std::string path = temporary_directory() + "/c";
  const Shape shape{600, 1000};
  run_ranks(2, [&](Group& group) {
    OnDevice gpu(Value::dict({{"rows", counting(shape, chunk(shape, group.rank(), 2), 1)},
                              {"all", counting(shape, whole(shape), 2)}}));
    SaveOptions options;
    options.copies = IfDiffers::refuse;
    save(gpu.tree, path, options, group);
  });
  run_ranks(3, [&](Group& group) {
    const Box columns = chunk(shape, group.rank(), 3, 1);
    const Value behind = Value::dict({{"rows", counting(shape, columns, 0, false)},
                                      {"all", counting(shape, columns, 0, false)}});
    OnDevice gpu(behind);
    load(gpu.tree, path, group);
    EXPECT_EQ(floats(behind.at("rows").as_tensor()), floats(counting(shape, columns, 1)));
    EXPECT_EQ(floats(behind.at("all").as_tensor()), floats(counting(shape, columns, 2)));
  });
}

TEST(Device, CopiesThatDifferAreSeen) {
  const std::string path = temporary_directory() + "/c";
  for (const std::int64_t rows : {3, 600}) {
    run_ranks(2, [&](Group& group) {
      const Shape shape{rows, 1000};
      OnDevice gpu(
          Value::dict({{"w", counting(shape, whole(shape), static_cast<float>(group.rank()))}}));
      SaveOptions options;
      options.copies = IfDiffers::refuse;
      EXPECT_EQ(code_of([&] { save(gpu.tree, path, options, group); }), ErrorCode::mismatch);
    });
  }
}

TEST(Device, CopiesThatDifferAreKept) {
  const std::string path = temporary_directory() + "/c";
  const Shape shape{600, 1000};
  run_ranks(2, [&](Group& group) {
    OnDevice gpu(
        Value::dict({{"w", counting(shape, whole(shape), static_cast<float>(group.rank()))},
                     {"same", counting(shape, whole(shape), 5)}}));
    save(gpu.tree, path, {.copies = IfDiffers::keep}, group);
  });
  const Value tree = Checkpoint::open(path).load();
  EXPECT_EQ(tree.size(), 3U);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(floats(tree.at(rank == 0 ? "w" : "w.rank1").as_tensor()),
              floats(counting(shape, whole(shape), static_cast<float>(rank))));
  }
}

// Row R16 of the failures that a save must survive.
TEST(Device, AFailingCopyFailsTheSaveOnAllRanksAndPublishesNothing_R16) {
  const Shape shape{900, 1000};
  for (const int number : {1, 2, 3}) {
    const std::string path = temporary_directory() + "/c";
    run_ranks(2, [&](Group& group) {
      OnDevice gpu(Value::dict({{"w", counting(shape, chunk(shape, group.rank(), 2), 1)},
                                {"t", counting({6}, whole({6}), 1)}}));
      if (group.rank() == 1) gpu.device->fail(number);
      const Error error = error_of([&] { save(gpu.tree, path, group); });
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      EXPECT_TRUE(error.peers().contains(1) && !error.peers().contains(0)) << error.what();
      EXPECT_EQ(gpu.device->open(), 0);
    });
    EXPECT_EQ(code_of([&] { (void)Checkpoint::open(path); }), ErrorCode::not_found);
    EXPECT_TRUE(data_of(path).empty());
  }
}

TEST(Device, AFailingCopyLeavesTheOldFile_R16) {
  const std::string root = temporary_directory();
  for (const auto& [name, kind] : kKinds) {
    const std::string path = root + "/" + name;
    const Value old = Value::dict({{"w", counting({4}, whole({4}), 0)}});
    save(old, path);
    OnDevice gpu(Value::dict({{"w", counting({900, 1000}, whole({900, 1000}), 1)}}));
    gpu.device->fail(2);
    EXPECT_EQ(code_of([&] { save(gpu.tree, path, {.overwrite = true}); }), ErrorCode::io) << name;
    EXPECT_EQ(floats(Checkpoint::open(path).load().at("w").as_tensor()),
              floats(old.at("w").as_tensor()));
  }
}

TEST(Device, AFailingCopyFailsTheLoadOnAllRanks) {
  const Shape shape{900, 1000};
  const std::string path = temporary_directory() + "/c";
  save(Value::dict({{"w", counting(shape, whole(shape), 0)}}), path);
  for (const Shape& strides : {Shape{}, Shape{1, 900}}) {
    run_ranks(2, [&](Group& group) {
      OnDevice gpu(Value::dict({{"w", random_tensor(DType::float32, shape, strides)}}));
      if (group.rank() == 1) gpu.device->fail(3);
      const Error error = error_of([&] { load(gpu.tree, path, group); });
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      EXPECT_TRUE(error.peers().contains(1)) << error.what();
      EXPECT_EQ(gpu.device->open(), 0);
    });
  }
}

TEST(Device, MemoryThatIsNotThereIsRefused) {
  const std::string path = temporary_directory() + "/c";
  const auto refused = [&](const auto& change) {
    OnDevice gpu(Value::dict({{"w", counting({8}, whole({8}), 0)}}));
    Piece& piece = gpu.tree.at("w").as_tensor().pieces[0];
    change(piece, *piece.storage);
    const Error error = error_of([&] { save(gpu.tree, path); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    EXPECT_EQ(error.key(), "w");
    EXPECT_EQ(code_of([&] { require_writable(gpu.tree.at("w").as_tensor(), "w"); }),
              ErrorCode::invalid_argument);
    EXPECT_EQ(gpu.device->copies(), 0);
  };
  std::byte one{};
  refused([](Piece& piece, Storage&) { piece.storage_offset = 1; });
  refused([](Piece& piece, Storage&) { piece.strides = {2}; });
  refused([](Piece&, Storage& storage) { storage.size = 100; });
  refused([&](Piece&, Storage& storage) { storage.data = &one; });
  refused([](Piece&, Storage& storage) { storage.source = memory_source({}, "file"); });
  refused([](Piece&, Storage& storage) { storage.encoding = Encoding::torch_item; });
}

TEST(Device, MemoryThatOverlapsIsRefusedAndTiedKeysAreCompared) {
  const std::string path = temporary_directory() + "/c";
  const Tensor values = counting({8}, whole({8}), 0);
  save(Value::dict({{"a", values}, {"b", values}, {"c", counting({8}, whole({8}), 1)}}), path);
  const Tensor held = counting({8}, whole({8}), 0, false);
  // Two storages of one memory, as two views of a tensor give.
  OnDevice one(Value::dict({{"t", held}}));
  OnDevice other(Value::dict({{"t", held}}));
  const auto key = [](const OnDevice& gpu) { return gpu.tree.at("t"); };
  Value tied = Value::dict({{"a", key(one)}, {"b", key(other).clone()}});
  load(tied, path);
  EXPECT_EQ(floats(held), floats(values));
  Value unlike = Value::dict({{"a", key(one)}, {"c", key(other)}});
  const Error error = error_of([&] { load(unlike, path); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch) << error.what();
  EXPECT_EQ(error.key(), "c");
  Tensor inside = key(other).as_tensor();
  inside.pieces[0].storage = std::make_shared<Storage>(*inside.pieces[0].storage);
  inside.pieces[0].storage->device = std::make_shared<FakeMemory>(
      *other.device, MutableByteView(held.pieces[0].storage->data + 4, 28));
  inside.pieces[0].storage->size = 28;
  inside.shape = {7};
  inside.pieces[0].slice = whole({7});
  const Value overlap = Value::dict({{"a", key(one)}, {"b", inside}});
  EXPECT_EQ(code_of([&] {
              (void)owners_of({{"a", overlap.at("a"), {}}, {"b", overlap.at("b"), {}}});
            }),
            ErrorCode::invalid_argument);
}

// A tensor of the host that map() put into an open checkpoint has no file to read.
TEST(Device, VerifyReadsLeavesThatAreInMemory) {
  const std::string path = temporary_directory() + "/c";
  save(Value::dict({{"w", counting({8}, whole({8}), 0)}}), path);
  OnDevice gpu(Value::dict({{"w", counting({8}, whole({8}), 1)}}));
  for (const Value& other : {Value(counting({8}, whole({8}), 1)), gpu.tree.at("w")}) {
    const Checkpoint mapped = Checkpoint::open(path).map([&](Leaf leaf) -> std::optional<Leaf> {
      leaf.value = other;
      return leaf;
    });
    EXPECT_TRUE(verify(mapped).findings.empty());
    EXPECT_EQ(floats(mapped.load().at("w").as_tensor()), floats(counting({8}, whole({8}), 1)));
  }
}

// Nothing is held of a piece without elements.
TEST(Device, PiecesWithoutElementsNeedNoStorage) {
  const std::string path = temporary_directory() + "/c";
  Tensor tensor = counting({0, 3}, whole({0, 3}), 0);
  tensor.pieces[0].storage = nullptr;
  save(Value::dict({{"w", tensor}}), path);
  EXPECT_EQ(Checkpoint::open(path).load().at("w").as_tensor().shape, Shape({0, 3}));
}

}  // namespace
}  // namespace tessera
