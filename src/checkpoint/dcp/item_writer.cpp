#include "checkpoint/dcp/item_writer.h"

#include <algorithm>
#include <cassert>

#include <zstd.h>

#include "base/crc32.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/storage_checks.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

std::size_t require_good(std::size_t code, const std::string& name) {
  if (ZSTD_isError(code) == 0) return code;
  throw Error(ErrorCode::limit, std::string("zstd: ") + ZSTD_getErrorName(code)).at_path(name);
}

}  // namespace

struct ZstdSink::Encoder {
  std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context{ZSTD_createCCtx(), ZSTD_freeCCtx};
};

ZstdSink::ZstdSink(int level, std::size_t window)
    : encoder_(std::make_unique<Encoder>()), window_(window) {
  if (!encoder_->context) throw Error(ErrorCode::limit, "no memory for a zstd encoder");
  require_good(ZSTD_CCtx_setParameter(encoder_->context.get(), ZSTD_c_compressionLevel, level), "");
}

ZstdSink::~ZstdSink() = default;

void ZstdSink::begin(ByteSink& out, std::uint64_t at, std::uint64_t size) {
  out_ = &out;
  begin_ = at;
  flushed_ = content_ = filled_ = 0;
  // The size makes the encoder's tables small where there is little to find, and readers see it.
  require_good(ZSTD_CCtx_reset(encoder_->context.get(), ZSTD_reset_session_only), out.name());
  require_good(ZSTD_CCtx_setPledgedSrcSize(encoder_->context.get(), size), out.name());
  const auto most = static_cast<std::size_t>(
      std::min<std::uint64_t>(window_, ZSTD_compressBound(static_cast<std::size_t>(size))));
  if (buffer_.size() < most) buffer_.resize(most);
}

void ZstdSink::write_at([[maybe_unused]] std::uint64_t offset, ByteView bytes) {
  assert(offset == content_);
  content_ += bytes.size();
  ZSTD_inBuffer source{bytes.data(), bytes.size(), 0};
  while (source.pos < source.size) {
    ZSTD_outBuffer target{buffer_.data(), buffer_.size(), filled_};
    require_good(ZSTD_compressStream2(encoder_->context.get(), &target, &source, ZSTD_e_continue),
                 name());
    filled_ = target.pos;
    if (filled_ == buffer_.size()) flush();
  }
}

std::uint64_t ZstdSink::end() {
  for (std::size_t rest = 1; rest != 0;) {
    ZSTD_inBuffer source{nullptr, 0, 0};
    ZSTD_outBuffer target{buffer_.data(), buffer_.size(), filled_};
    rest = require_good(ZSTD_compressStream2(encoder_->context.get(), &target, &source, ZSTD_e_end),
                        name());
    filled_ = target.pos;
    flush();
  }
  return flushed_;
}

void ZstdSink::flush() {
  if (filled_ == 0) return;
  out_->write_at(begin_ + flushed_, ByteView(buffer_).first(filled_));
  flushed_ += filled_;
  filled_ = 0;
}

namespace {

constexpr const char* kRoot = "archive";  // the root folder of items
constexpr std::size_t kArchives = 256;    // that are kept

// Bytes of an archive that is put together in memory: four writes of a few bytes cost more than
// one and a copy.
constexpr std::uint64_t kSmallArchive = 64 << 10;

// The bytes of an archive in memory.
class ArchiveInMemory final : public ByteSink {
 public:
  ArchiveInMemory(std::vector<std::byte>& bytes, std::uint64_t size) : bytes_(bytes) {
    bytes_.resize(static_cast<std::size_t>(size));
  }
  void write_at(std::uint64_t offset, ByteView bytes) override {
    std::ranges::copy(bytes, bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  void commit() override {}
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  std::vector<std::byte>& bytes_;
  std::string name_;
};

}  // namespace

struct ItemWriter::Unfilled {
  explicit Unfilled(Value of) : tree(std::move(of)), archive(tree, kRoot) {}
  Value tree;
  torch_file::Writer archive;
};

std::uint32_t write_elements(ByteSink& sink, std::uint64_t at, std::int64_t count,
                             std::size_t element, const ElementSource& elements,
                             MutableByteView scratch) {
  const auto step = static_cast<std::int64_t>(std::max<std::size_t>(scratch.size() / element, 1));
  std::uint32_t crc = 0;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const ByteView bytes = elements(begin, std::min(step, count - begin), scratch);
    crc = crc32(bytes, crc);
    sink.write_at(at, bytes);
    at += bytes.size();
  }
  return crc;
}

std::uint32_t write_storage(ByteSink& sink, std::uint64_t at, const Storage& storage,
                            MutableByteView scratch,
                            const std::function<void(std::size_t)>& progress) {
  StorageReader reader(storage);
  const std::uint32_t crc = write_elements(
      sink, at, static_cast<std::int64_t>(storage.size), 1,
      [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
        const ByteView bytes = reader.view(static_cast<std::uint64_t>(begin),
                                           buffer.first(static_cast<std::size_t>(count)));
        if (progress) progress(bytes.size());
        return bytes;
      },
      scratch);
  if (has_crc(storage)) require_crc(storage, crc, "");
  return crc;
}

ItemWriter::ItemWriter(ByteSink& sink, std::string path, std::size_t window,
                       std::optional<int> zstd_level)
    : sink_(sink), path_(std::move(path)), window_(window) {
  if (zstd_level) zstd_ = std::make_unique<ZstdSink>(*zstd_level, window);
}

ItemWriter::~ItemWriter() = default;

MutableByteView ItemWriter::scratch_for(std::uint64_t bytes) {
  const auto needed = static_cast<std::size_t>(std::min<std::uint64_t>(window_, bytes));
  if (scratch_.size() < needed) scratch_.resize(needed);
  return scratch_;
}

dcp::Item ItemWriter::tensor(DType dtype, const Shape& shape, const ElementSource& elements) {
  const MutableByteView scratch = scratch_for(byte_size(dtype, shape));
  return made(archive_of(dtype, shape), Way::gathered,
              [&](ByteSink& sink, std::uint64_t at, const auto&) {
                return write_elements(sink, at, numel(shape), size_of(dtype), elements, scratch);
              });
}

dcp::Item ItemWriter::tensor(DType dtype, const Shape& shape, const ElementWriter& elements) {
  return made(archive_of(dtype, shape), Way::straight,
              [&](ByteSink& sink, std::uint64_t at, const auto&) { return elements(sink, at); });
}

const torch_file::Writer& ItemWriter::archive_of(DType dtype, const Shape& shape) {
  if (archives_.size() == kArchives) archives_.clear();
  std::unique_ptr<Unfilled>& found = archives_[{dtype, shape}];
  if (!found) {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.shape = shape;
    found = std::make_unique<Unfilled>(Value(std::move(tensor)));
  }
  return found->archive;
}

dcp::Item ItemWriter::value(const Value& value) {
  return made(torch_file::Writer(value, kRoot), Way::gathered,
              [&](ByteSink& sink, std::uint64_t at, const torch_file::Writer::Slot& slot) {
                const MutableByteView scratch = scratch_for(slot.size);
                if (slot.storage) return write_storage(sink, at, *slot.storage, scratch);
                const Tensor& tensor = *slot.tensor;
                TensorReader reader(tensor, "");
                const std::size_t element = size_of(tensor.dtype);
                return write_elements(
                    sink, at, numel(tensor.shape), element,
                    [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
                      reader.read(whole(tensor.shape), begin, count, buffer.data());
                      return ByteView(buffer).first(static_cast<std::size_t>(count) * element);
                    },
                    scratch);
              });
}

dcp::Item ItemWriter::archive(ByteView bytes) {
  archive_size_ = bytes.size();
  dcp::Item item{path_, offset_, archive_size_, {}};
  sink_.write_at(offset_, bytes);
  offset_ += item.length;
  return item;
}

dcp::Item ItemWriter::made(torch_file::Writer archive, Way way, const SlotWriter& write_slot) {
  archive_size_ = archive.size();
  if (zstd_) zstd_->begin(sink_, offset_, archive_size_);
  ByteSink& target = zstd_ ? *zstd_ : sink_;
  const std::uint64_t begin = zstd_ ? 0 : offset_;
  const auto write_to = [&](ByteSink& sink, std::uint64_t at) {
    for (const auto& segment : archive.fixed()) sink.write_at(at + segment.offset, segment.bytes);
    archive.stream(
        [&](const auto& slot) { return write_slot(sink, at + slot.offset, slot); },
        [&](std::uint64_t offset, ByteView bytes) { sink.write_at(at + offset, bytes); });
  };
  if (way == Way::gathered && archive_size_ <= kSmallArchive) {
    ArchiveInMemory small(small_, archive_size_);
    write_to(small, 0);
    target.write_at(begin, small_);
  } else {
    write_to(target, begin);
  }
  dcp::Item item{path_, offset_, archive_size_, {}};
  if (zstd_) {
    item.length = zstd_->end();
    item.transforms = {kZstdTransform};
  }
  offset_ += item.length;
  return item;
}

}  // namespace tessera
