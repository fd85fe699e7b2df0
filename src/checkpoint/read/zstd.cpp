#include "checkpoint/read/zstd.h"

#include <zstd_errors.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <zstd.h>

#include "base/numbers.h"
#include "base/process.h"
#include "checkpoint/read/reader.h"
#include "format/torch/torch_file.h"
#include "io/source.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr int kWindowLog = 24;  // level 19 of the zstd program needs 23
constexpr std::size_t kBuffer = 128 << 10;

}  // namespace

struct ZstdStream::Decoder {
  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context{ZSTD_createDCtx(), ZSTD_freeDCtx};
};

ZstdStream::ZstdStream(std::shared_ptr<const ByteSource> frames, std::uint64_t cap)
    : frames_(std::move(frames)),
      cap_(cap),
      decoder_(std::make_unique<Decoder>()),
      input_(static_cast<std::size_t>(std::min<std::uint64_t>(kBuffer, frames_->size()))) {
  if (!decoder_->context) throw Error(ErrorCode::limit, "no memory for a zstd decoder");
  ZSTD_DCtx_setParameter(decoder_->context.get(), ZSTD_d_windowLogMax, kWindowLog);
}

ZstdStream::~ZstdStream() = default;

std::size_t ZstdStream::read(MutableByteView out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t got = decode(out.subspan(done));
    if (got == 0) break;
    done += got;
    position_ += got;
    if (position_ <= cap_) continue;
    throw Error(ErrorCode::limit, "zstd frames hold more than the " + std::to_string(cap_) +
                                      " bytes that they should")
        .at_path(frames_->name());
  }
  return done;
}

void ZstdStream::go_to(std::uint64_t position) {
  if (position < position_) {
    ZSTD_DCtx_reset(decoder_->context.get(), ZSTD_reset_session_only);
    position_ = consumed_ = 0;
    begin_ = end_ = 0;
    inside_ = false;
  }
  std::vector<std::byte> skipped(position == position_ ? 0 : kBuffer);
  while (position_ < position) {
    const auto part = std::min<std::uint64_t>(skipped.size(), position - position_);
    if (read(MutableByteView(skipped).first(static_cast<std::size_t>(part))) < part) return;
  }
}

// Reads on when all of input_ is decoded and the frames go on.
void ZstdStream::refill() {
  if (begin_ != end_ || consumed_ >= frames_->size()) return;
  begin_ = 0;
  end_ =
      static_cast<std::size_t>(std::min<std::uint64_t>(input_.size(), frames_->size() - consumed_));
  frames_->read_at(consumed_, MutableByteView(input_).first(end_));
  consumed_ += end_;
}

// Some of the next bytes of the content; 0 at its end.
std::size_t ZstdStream::decode(MutableByteView out) {
  ZSTD_outBuffer target{out.data(), out.size(), 0};
  while (target.pos == 0) {
    refill();
    const bool exhausted = begin_ == end_;
    if (exhausted && !inside_) return 0;
    ZSTD_inBuffer source{input_.data(), end_, begin_};
    const std::size_t hint = ZSTD_decompressStream(decoder_->context.get(), &target, &source);
    if (ZSTD_isError(hint) != 0) fail(hint);
    inside_ = hint != 0;
    begin_ = source.pos;
    if (exhausted && target.pos == 0 && inside_) {
      throw Error(ErrorCode::incomplete, "a zstd frame ends too early").at_path(frames_->name());
    }
  }
  return target.pos;
}

void ZstdStream::fail(std::size_t code) const {
  const bool window = ZSTD_getErrorCode(code) == ZSTD_error_frameParameter_windowTooLarge;
  throw Error(window ? ErrorCode::limit : ErrorCode::corrupt,
              std::string("zstd: ") + ZSTD_getErrorName(code))
      .at_path(frames_->name());
}

namespace {

constexpr std::size_t kCachedBytes = 64 << 10;

// Bytes of the content that stay in memory.
struct CachedBytes {
  std::uint64_t offset = 0;
  std::vector<std::byte> bytes;

  bool give(std::uint64_t at, MutableByteView out) const {
    if (at < offset || at - offset > bytes.size() || out.size() > bytes.size() - (at - offset))
      return false;
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at - offset), out.size(), out.begin());
    return true;
  }
};

class ZstdSource final : public ByteSource {
 public:
  ZstdSource(std::shared_ptr<const ByteSource> frames, std::uint64_t cap)
      : frames_(std::move(frames)), cap_(cap) {
    ZstdStream& stream = current().stream;
    keep_ends(stream);
    size_ = stream.position();
  }

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return frames_->name(); }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (head_.give(offset, out) || tail_.give(offset, out)) return;
    Current& now = current();
    const std::lock_guard lock(now.mutex);
    now.stream.go_to(offset);
    if (now.stream.position() != offset || now.stream.read(out) < out.size())
      throw Error(ErrorCode::incomplete, "zstd frames have changed").at_path(name());
  }

 private:
  struct Current {
    Current(std::shared_ptr<const ByteSource> frames, std::uint64_t cap)
        : stream(std::move(frames), cap) {}
    std::mutex mutex;
    ZstdStream stream;  // guarded by mutex once the source is made
  };
  // In a child from the first byte on: its parent's may have been in the middle of a frame.
  [[nodiscard]] Current& current() const {
    return current_.get([this] { return std::make_unique<Current>(frames_, cap_); });
  }

  // Frames of a stream do not say how long they are: one pass counts. Archives have what describes
  // them at their ends: these are kept, so that no further pass is needed for that.
  void keep_ends(ZstdStream& stream) {
    head_.bytes.resize(kCachedBytes);
    head_.bytes.resize(stream.read(head_.bytes));
    if (head_.bytes.size() < kCachedBytes) return;
    std::vector<std::byte>& last = tail_.bytes;
    last.resize(2 * kCachedBytes);
    std::size_t have = 0;
    while (const std::size_t got = stream.read(MutableByteView(last).subspan(have, kCachedBytes))) {
      have += got;
      if (have < last.size()) continue;
      std::memcpy(last.data(), last.data() + kCachedBytes, kCachedBytes);
      have = kCachedBytes;
    }
    last.resize(have);
    tail_.offset = stream.position() - have;
  }

  std::uint64_t size_ = 0;  // of the content
  CachedBytes head_, tail_;
  std::shared_ptr<const ByteSource> frames_;
  std::uint64_t cap_;
  PerProcess<Current> current_;
};

}  // namespace

std::shared_ptr<const ByteSource> zstd_source(std::shared_ptr<const ByteSource> frames,
                                              std::uint64_t cap) {
  return std::make_shared<ZstdSource>(std::move(frames), cap);
}

namespace {

// An archive of a chunk is its elements, a pickle and little more, unless the chunk's storage is a
// view's.
constexpr std::uint64_t kArchiveRoom = 16 << 20;

[[noreturn]] void refuse(const std::string& what, const Piece& piece, const std::string& name) {
  throw Error(ErrorCode::corrupt, what)
      .at_path(piece.storage->source->name())
      .at_key(name)
      .at_offset(piece.storage->offset);
}

// An item is a zip and nothing else, not even an older stream of torch.save.
void require_zip(const ByteSource& source) {
  std::array<std::byte, 2> start{};
  if (source.size() >= start.size()) source.read_at(0, start);
  if (start == std::array{std::byte{'P'}, std::byte{'K'}}) return;
  throw Error(ErrorCode::corrupt, "the item is not a torch.save archive").at_offset(0);
}

}  // namespace

std::uint64_t most_in_item(const Tensor& tensor, const Piece& piece) {
  const auto count = narrow<std::uint64_t>(numel(piece.slice));
  const auto size = checked_mul<std::uint64_t>(count, size_of(tensor.dtype));
  return checked_add(size, kArchiveRoom);
}

void require_item(const Tensor& tensor, const Piece& piece, const Tensor& item,
                  const std::string& name) {
  const Shape& expected = std::get<Box>(piece.slice).sizes;
  if (item.shape != expected) {
    refuse("the item holds a tensor of shape " + to_string(item.shape) + ", .metadata says " +
               to_string(expected),
           piece, name);
  }
  const DType stored = tensor.stored.value_or(tensor.dtype);
  if (item.dtype != stored) {
    refuse("the item holds " + std::string(to_string(item.dtype)) + ", .metadata says " +
               std::string(to_string(stored)),
           piece, name);
  }
}

Piece decoded_piece(const Tensor& tensor, const Piece& piece, const std::string& name) {
  if (!piece.storage) {
    throw Error(ErrorCode::invalid_argument, "this rank does not hold the piece").at_key(name);
  }
  const Storage& storage = *piece.storage;
  if (!is_in_memory(storage) && !storage.source) {
    throw Error(ErrorCode::invalid_argument, "the piece has neither memory nor a source")
        .at_key(name);
  }
  if (storage.encoding == Encoding::raw) return piece;
  Tensor item;
  try {
    std::shared_ptr<const ByteSource> bytes =
        slice_source(storage.source, storage.offset, storage.size);
    if (storage.encoding == Encoding::torch_item_zstd) {
      bytes = zstd_source(std::move(bytes), most_in_item(tensor, piece));
    }
    require_zip(*bytes);
    item = torch_file::read_tensor_item(std::move(bytes));
  } catch (Error& error) {
    throw error.at_path(storage.source->name()).at_key(name).at_offset(storage.offset);
  }
  require_item(tensor, piece, item, name);
  Piece raw = item.pieces.at(0);
  raw.slice = piece.slice;
  return raw;
}

}  // namespace tessera
