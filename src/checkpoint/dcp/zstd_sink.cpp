#include "checkpoint/dcp/zstd_sink.h"

#include <zstd.h>

#include <algorithm>
#include <cassert>

#include "tessera/error.h"

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

}  // namespace tessera
