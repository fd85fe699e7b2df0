#include "checkpoint/read/zstd_source.h"

#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "io/range.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kWindowLog = 24;  // level 19 of the zstd program needs 23
constexpr std::size_t kBuffer = 128 << 10;

class ZstdSource final : public ByteSource {
 public:
  ZstdSource(std::shared_ptr<const ByteSource> frames, std::uint64_t cap)
      : frames_(std::move(frames)), context_(ZSTD_createDCtx(), ZSTD_freeDCtx), input_(kBuffer) {
    if (!context_) throw Error(ErrorCode::limit, "no memory for a zstd decoder");
    ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, kWindowLog);
    size_ = counted_size(cap);
    restart();
  }

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return frames_->name(); }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    const std::lock_guard lock(mutex_);
    if (offset < position_) restart();
    skip_to(offset);
    fill(out);
  }

 private:
  // Frames of a stream do not say how long they are: one pass counts.
  [[nodiscard]] std::uint64_t counted_size(std::uint64_t cap) const {
    std::vector<std::byte> scratch(kBuffer);
    std::uint64_t size = 0;
    while (const std::size_t got = decode(scratch)) {
      size += got;
      if (size > cap) {
        throw Error(ErrorCode::limit, "zstd frames hold more than the " + std::to_string(cap) +
                                          " bytes that they should")
            .at_path(name());
      }
    }
    return size;
  }

  void skip_to(std::uint64_t offset) const {
    std::vector<std::byte> skipped(offset == position_ ? 0 : kBuffer);
    while (position_ < offset) {
      const auto part = std::min<std::uint64_t>(skipped.size(), offset - position_);
      fill(MutableByteView(skipped).first(part));
    }
  }

  void restart() const {
    ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_only);
    position_ = consumed_ = 0;
    begin_ = end_ = 0;
    inside_ = false;
  }

  void fill(MutableByteView out) const {
    while (!out.empty()) {
      const std::size_t got = decode(out);
      if (got == 0) throw Error(ErrorCode::incomplete, "zstd frames have changed").at_path(name());
      position_ += got;
      out = out.subspan(got);
    }
  }

  // Reads on when all of input_ is decoded and the frames go on.
  void refill() const {
    if (begin_ != end_ || consumed_ >= frames_->size()) return;
    begin_ = 0;
    end_ = static_cast<std::size_t>(
        std::min<std::uint64_t>(input_.size(), frames_->size() - consumed_));
    frames_->read_at(consumed_, MutableByteView(input_).first(end_));
    consumed_ += end_;
  }

  // The next bytes of the content, at most out.size(); 0 at its end.
  std::size_t decode(MutableByteView out) const {
    ZSTD_outBuffer target{out.data(), out.size(), 0};
    while (target.pos == 0) {
      refill();
      const bool exhausted = begin_ == end_;
      if (exhausted && !inside_) return 0;
      ZSTD_inBuffer source{input_.data(), end_, begin_};
      const std::size_t hint = ZSTD_decompressStream(context_.get(), &target, &source);
      if (ZSTD_isError(hint) != 0) fail(hint);
      inside_ = hint != 0;
      begin_ = source.pos;
      if (exhausted && target.pos == 0 && inside_) {
        throw Error(ErrorCode::incomplete, "a zstd frame ends too early").at_path(name());
      }
    }
    return target.pos;
  }

  [[noreturn]] void fail(std::size_t code) const {
    const bool window = ZSTD_getErrorCode(code) == ZSTD_error_frameParameter_windowTooLarge;
    throw Error(window ? ErrorCode::limit : ErrorCode::corrupt,
                std::string("zstd: ") + ZSTD_getErrorName(code))
        .at_path(name());
  }

  std::shared_ptr<const ByteSource> frames_;
  std::uint64_t size_ = 0;    // of the content
  mutable std::mutex mutex_;  // guards everything below once the constructor is done
  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context_;
  mutable std::vector<std::byte> input_;
  mutable std::size_t begin_ = 0;       // of what is unread in input_
  mutable std::size_t end_ = 0;         // of what is in input_
  mutable std::uint64_t consumed_ = 0;  // of frames_
  mutable std::uint64_t position_ = 0;  // in the content
  mutable bool inside_ = false;         // a frame
};

}  // namespace

std::shared_ptr<const ByteSource> zstd_source(std::shared_ptr<const ByteSource> frames,
                                              std::uint64_t cap) {
  return std::make_shared<ZstdSource>(std::move(frames), cap);
}

}  // namespace tessera
