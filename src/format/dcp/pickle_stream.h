// A pickle of protocol 4 that is written a window at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "base/numbers.h"
#include "format/pickle/opcodes.h"
#include "tessera/io.h"

namespace tessera::dcp {

// Each window is one frame of the pickle, so a reader without a buffer of its own fetches it whole.
class PickleStream {
 public:
  using Op = pickle::Op;
  // Takes bytes that follow those of the call before. What it throws leaves every function here.
  using Write = std::function<void(ByteView bytes)>;

  // `write` must outlive the stream.
  explicit PickleStream(const Write& write);

  void op(Op code) { *room(1) = static_cast<std::byte>(code); }
  template <class T>
  void op(Op code, T argument) {
    std::byte* at = room(1 + sizeof argument);
    *at = static_cast<std::byte>(code);
    store_le(at + 1, argument);
  }
  void integer(std::int64_t number);
  // Throws `corrupt` for what is not UTF-8.
  void text(std::string_view text);
  // The memo's next entry is what was written last; its number is the count of calls before.
  void memoize() { op(Op::memoize); }
  void recall(std::uint32_t entry) {
    if (entry <= 0xff) {
      op(Op::binget, static_cast<std::uint8_t>(entry));
    } else {
      op(Op::long_binget, entry);
    }
  }

  // Between two values that belong to one container: a full window goes out.
  void boundary() {
    if (used_ >= kWindow) flush();
  }
  // STOP, and what is left. To be called once, after everything else.
  void finish();

 private:
  static constexpr std::size_t kWindow = std::size_t{1} << 20;
  static constexpr std::size_t kFrameHeader = 9;

  // Each opcode asks: a call for it would be a fifth of the time of an encoding.
  [[gnu::always_inline]] std::byte* room(std::size_t size) {
    if (used_ + size > buffer_.size()) buffer_.resize(2 * (used_ + size));
    std::byte* at = buffer_.data() + used_;
    used_ += size;
    return at;
  }
  void flush();

  const Write& write_;
  std::vector<std::byte> buffer_;  // the open frame, behind room for its header
  std::size_t used_ = 0;
};

}  // namespace tessera::dcp
