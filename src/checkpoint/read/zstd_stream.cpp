#include "checkpoint/read/zstd_stream.h"

#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>

#include "tessera/error.h"

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

}  // namespace tessera
