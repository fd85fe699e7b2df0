// The bytes of a pickle that is written, cut into frames as CPython's pickler cuts them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/numbers.h"
#include "format/pickle/opcodes.h"
#include "tessera/io.h"

namespace tessera::pickle {

class Output {
 public:
  // Frames are used from here on (protocol 4).
  void begin_framing() { framing_ = true; }

  void op(Op code) { put(static_cast<std::byte>(code)); }

  template <class T>
  void op(Op code, T argument) {
    op(code);
    open_frame();
    append_le(bytes_, argument);
  }

  // An opcode's argument and the payload that it announces. Large payloads stay outside of frames,
  // with what announces them.
  template <class T>
  void op(Op code, T size, ByteView payload) {
    const bool outside = framing_ && payload.size() >= kFrameTarget;
    if (outside) {
      close_frame();
      framing_ = false;
    }
    op(code, size);
    bytes_.insert(bytes_.end(), payload.begin(), payload.end());
    if (outside) framing_ = true;
  }

  void text(std::string_view text) {
    open_frame();
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), bytes, bytes + text.size());
  }

  // Between two values: a frame that is full ends here.
  void boundary() {
    if (frame_ && bytes_.size() - *frame_ - kFrameHeader >= kFrameTarget) close_frame();
  }

  [[nodiscard]] std::vector<std::byte> finish() && {
    close_frame();
    return std::move(bytes_);
  }

 private:
  static constexpr std::size_t kFrameTarget = 64 * 1024;
  static constexpr std::size_t kFrameHeader = 9;
  static constexpr std::size_t kSmallestFrame = 4;

  void put(std::byte byte) {
    open_frame();
    bytes_.push_back(byte);
  }

  void open_frame() {
    if (!framing_ || frame_) return;
    frame_ = bytes_.size();
    bytes_.resize(bytes_.size() + kFrameHeader);
  }

  void close_frame() {
    if (!frame_) return;
    const std::uint64_t size = bytes_.size() - *frame_ - kFrameHeader;
    const auto at = bytes_.begin() + static_cast<std::ptrdiff_t>(*frame_);
    if (size < kSmallestFrame) {
      bytes_.erase(at, at + kFrameHeader);
    } else {
      *at = static_cast<std::byte>(Op::frame);
      std::memcpy(&*at + 1, &size, sizeof size);
    }
    frame_.reset();
  }

  std::vector<std::byte> bytes_;
  std::optional<std::size_t> frame_;  // where the open frame begins
  bool framing_ = false;
};

}  // namespace tessera::pickle
