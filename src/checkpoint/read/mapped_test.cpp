#include "tessera/mapped.h"

#include "checkpoint/test_support.h"
#include "io/source.h"

namespace tessera {

// Which tensors become views of a mapped file. python/tests/test_mmap.py has the kinds, the dtypes
// and what becomes of the file.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// Counts mappings, and cannot be read.
class MappedAlone final : public ForwardingSource {
 public:
  explicit MappedAlone(std::shared_ptr<const ByteSource> inner)
      : ForwardingSource(std::move(inner)) {}
  void read_at(std::uint64_t, MutableByteView) const override { throw std::logic_error("read"); }
  [[nodiscard]] std::shared_ptr<std::byte[]> map() const override {
    ++mapped;
    return ForwardingSource::map();
  }
  [[nodiscard]] const ByteSource& original() const override { return *this; }

  mutable int mapped = 0;
};

class Mapped : public testing::Test {
 protected:
  Mapped() {
    std::vector<std::byte> bytes(4096);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
    put(*store_, "file", bytes, IfExists::fail);
    file_ = std::make_shared<MappedAlone>(store_->open("file"));
  }

  // A tensor of bytes of the file.
  [[nodiscard]] static Tensor tensor(std::shared_ptr<const ByteSource> source, std::uint64_t offset,
                                     DType dtype, const Shape& shape) {
    auto storage = std::make_shared<Storage>();
    storage->source = std::move(source);
    storage->offset = offset;
    storage->size = byte_size(dtype, shape);
    Tensor made;
    made.dtype = dtype;
    made.shape = shape;
    made.pieces = {Piece{whole(shape), std::move(storage), 0, {}, -1}};
    return made;
  }
  [[nodiscard]] std::optional<Tensor> view(const Tensor& tensor) {
    return files_.view(tensor, "key");
  }
  [[nodiscard]] static std::byte first(const std::optional<Tensor>& view) {
    return *view.value().pieces.at(0).storage->data;
  }

  std::shared_ptr<Store> store_ = posix_store(temporary_directory());
  std::shared_ptr<MappedAlone> file_;
  MappedFiles files_;
};

TEST_F(Mapped, OnceWhateverTheTensorsAre) {
  const auto slice = slice_source(slice_source(file_, 8, 64), 4, 32);
  EXPECT_EQ(first(view(tensor(file_, 16, DType::float32, {2}))), std::byte{16});
  EXPECT_EQ(first(view(tensor(slice, 4, DType::float32, {2}))), std::byte{16});
  EXPECT_EQ(first(view(tensor(slice, 5, DType::uint8, {2}))), std::byte{17});
  EXPECT_EQ(file_->mapped, 1);
}

TEST_F(Mapped, OnlyWhatIsAlignedAsItsDtypeAsks) {
  EXPECT_FALSE(view(tensor(file_, 2, DType::float32, {2})));
  EXPECT_FALSE(view(tensor(file_, 4, DType::float64, {2})));
  EXPECT_FALSE(view(tensor(file_, 2, DType::complex64, {2})));
  EXPECT_TRUE(view(tensor(file_, 4, DType::complex64, {2})));
  EXPECT_TRUE(view(tensor(file_, 1, DType::bool8, {2})));
}

TEST_F(Mapped, OnlyOnePieceOfPlainElements) {
  const Tensor plain = tensor(file_, 0, DType::float32, {4});
  ASSERT_TRUE(view(plain));
  Tensor two = plain;
  two.pieces = {plain.pieces[0], plain.pieces[0]};
  two.pieces[0].slice = Box{{0}, {2}};
  two.pieces[1].slice = Box{{2}, {2}};
  EXPECT_FALSE(view(two));
  Tensor part = plain;
  part.pieces[0].slice = Box{{0}, {2}};
  EXPECT_FALSE(view(part));
  Tensor converted = plain;
  converted.stored = DType::float16;
  EXPECT_FALSE(view(converted));
  Tensor encoded = plain;
  encoded.pieces[0].storage = std::make_shared<Storage>(*plain.pieces[0].storage);
  encoded.pieces[0].storage->encoding = Encoding::torch_item_zstd;
  EXPECT_FALSE(view(encoded));
  EXPECT_FALSE(view(tensor(file_, 0, DType::float32, {0})));
}

TEST_F(Mapped, OnlyWhatLiesInTheStorageAndInTheFile) {
  Tensor beyond = tensor(file_, 0, DType::float32, {4});
  beyond.pieces[0].storage_offset = 1;
  EXPECT_FALSE(view(beyond));
  EXPECT_TRUE(view(tensor(file_, 4080, DType::float32, {4})));
  EXPECT_FALSE(view(tensor(file_, 4084, DType::float32, {4})));
  EXPECT_FALSE(view(tensor(file_, ~std::uint64_t{3}, DType::float32, {4})));
}

// What is written into one element would be in others of the same tensor.
TEST_F(Mapped, OnlyElementsThatAreApart) {
  const auto strided = [&](const Shape& shape, const Shape& strides) {
    Tensor made = tensor(file_, 0, DType::float32, shape);
    made.pieces[0].storage->size = 64;
    made.pieces[0].strides = strides;
    return made;
  };
  EXPECT_FALSE(view(strided({4, 3}, {0, 1})));  // as expand() makes it
  EXPECT_FALSE(view(strided({4, 3}, {1, 1})));  // and unfold()
  EXPECT_FALSE(view(strided({4}, {0})));
  EXPECT_TRUE(view(strided({1, 3}, {0, 1})));
  EXPECT_TRUE(view(strided({3, 4}, {1, 3})));
  EXPECT_TRUE(view(strided({2, 3}, {3, 2})));  // 0 2 4, 3 5 7
}

TEST_F(Mapped, OtherStoresAreRead) {
  EXPECT_FALSE(
      view(tensor(memory_source(std::vector<std::byte>(16), "x"), 0, DType::float32, {4})));
}

TEST_F(Mapped, ViewsOutliveTheFilesAndChangeNone) {
  std::optional<Tensor> kept;
  {
    MappedFiles files;
    kept = files.view(tensor(store_->open("file"), 16, DType::float32, {2}), "key");
  }
  store_->remove("file");
  EXPECT_EQ(first(kept), std::byte{16});
  *kept->pieces[0].storage->data = std::byte{7};
  EXPECT_EQ(first(view(tensor(file_, 16, DType::float32, {2}))), std::byte{16});
}

TEST_F(Mapped, AChangedFileIsAConflict) {
  const auto source = store_->open("file");
  std::filesystem::resize_file(store_->name() + "/file", 4000);
  EXPECT_EQ(code_of([&] { (void)view(tensor(source, 16, DType::float32, {2})); }),
            ErrorCode::conflict);
}

// A load counts no byte of what it maps, and gives the same tree.
TEST_F(Mapped, LoadsOfTrees) {
  const std::string path = temporary_directory() + "/step";
  const Tensor whole = counting({3, 4}, Box{{0, 0}, {3, 4}}, 0);
  Value tree = Value::dict();
  Tensor saved = whole;
  saved.sharded = false;
  tree.set_item("w", Value(saved));
  tree.set_item("step", Value(7));
  save(tree, path);
  const Checkpoint checkpoint = Checkpoint::open(path);
  LoadOptions options;
  options.map = true;
  std::uint64_t total = 1;
  options.progress = [&](const Progress& now) { total = now.total; };
  const Value loaded = checkpoint.load(options);
  EXPECT_EQ(total, 0U);
  EXPECT_EQ(loaded.at("step"), Value(7));
  EXPECT_TRUE(diff(checkpoint, Checkpoint::open(path)).empty());
  const Tensor& made = loaded.at("w").as_tensor();
  ASSERT_NE(made.pieces.at(0).storage->data, nullptr);
  EXPECT_EQ(std::memcmp(made.pieces[0].storage->data, whole.pieces[0].storage->data, 48), 0);
}

}  // namespace
}  // namespace tessera
