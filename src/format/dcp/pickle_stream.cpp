#include "format/dcp/pickle_stream.h"

#include <array>
#include <bit>
#include <limits>
#include <span>
#include <utility>

#include "format/pickle/text.h"

namespace tessera::dcp {
namespace {

constexpr std::uint8_t kProtocol = 4;

// Bytes of the shortest two's complement of a number.
std::uint8_t width_of(std::int64_t number) {
  const auto bits = static_cast<std::uint64_t>(number < 0 ? ~number : number);
  return static_cast<std::uint8_t>(std::bit_width(bits) / 8 + 1);
}

}  // namespace

PickleStream::PickleStream(const Write& write) : write_(write), buffer_(kWindow + kWindow / 16) {
  std::array<std::byte, 2> head{static_cast<std::byte>(Op::proto), std::byte{kProtocol}};
  write_(head);
  used_ = kFrameHeader;
}

void PickleStream::integer(std::int64_t number) {
  if (std::in_range<std::uint8_t>(number)) {
    op(Op::binint1, static_cast<std::uint8_t>(number));
  } else if (std::in_range<std::uint16_t>(number)) {
    op(Op::binint2, static_cast<std::uint16_t>(number));
  } else if (std::in_range<std::int32_t>(number)) {
    op(Op::binint, static_cast<std::int32_t>(number));
  } else {
    const std::uint8_t width = width_of(number);
    op(Op::long1, width);
    std::memcpy(room(width), &number, width);
  }
}

void PickleStream::text(std::string_view text) {
  pickle::require_utf8(text);
  if (std::in_range<std::uint8_t>(text.size())) {
    op(Op::short_binunicode, static_cast<std::uint8_t>(text.size()));
  } else if (std::in_range<std::uint32_t>(text.size())) {
    op(Op::binunicode, static_cast<std::uint32_t>(text.size()));
  } else {
    op(Op::binunicode8, std::uint64_t{text.size()});
  }
  if (!text.empty()) std::memcpy(room(text.size()), text.data(), text.size());
}

void PickleStream::flush() {
  buffer_[0] = static_cast<std::byte>(Op::frame);
  store_le(buffer_.data() + 1, std::uint64_t{used_ - kFrameHeader});
  write_(std::span(buffer_).first(used_));
  used_ = kFrameHeader;
}

void PickleStream::finish() {
  op(Op::stop);
  flush();
}

}  // namespace tessera::dcp
