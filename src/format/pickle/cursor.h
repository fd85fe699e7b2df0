// Reads a pickle's bytes forward, never past their end and never across the border of a frame.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/numbers.h"
#include "format/pickle/opcodes.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera::pickle {

class Cursor {
 public:
  explicit Cursor(ByteView bytes) : bytes_(bytes) {}

  [[nodiscard]] std::size_t at() const noexcept { return at_; }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }

  // The opcode at the cursor. Leaves a frame that ends here.
  [[nodiscard]] std::uint8_t opcode() {
    if (at_ == frame_end_) frame_end_ = kNoFrame;
    return number<std::uint8_t>();
  }

  template <class T>
  [[nodiscard]] T number() {
    return load_le<T>(take(sizeof(T)).data());
  }

  [[nodiscard]] ByteView take(std::uint64_t size) {
    if (size > left()) truncated(size);
    if (size > frame_end_ - at_) cross_frame();
    const ByteView taken = bytes_.subspan(at_, size);
    at_ += size;
    return taken;
  }

  [[nodiscard]] std::string_view text(std::uint64_t size) {
    const ByteView taken = take(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

  // What lies ahead, without moving.
  [[nodiscard]] ByteView rest() const { return bytes_.subspan(at_); }
  [[nodiscard]] std::byte byte_at(std::size_t at) const { return bytes_[at]; }
  // The text from `at` up to its newline, or up to the end.
  [[nodiscard]] std::string_view line_at(std::size_t at) const {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + at,
                                bytes_.size() - at);
    return rest.substr(0, rest.find('\n'));
  }
  // Goes to `at`, inside the bytes and outside of every frame, or inside the one that it is in.
  void jump(std::size_t at) noexcept { at_ = at; }
  [[nodiscard]] bool in_frame() const noexcept { return frame_end_ != kNoFrame; }

  // Up to the next newline, which is skipped.
  [[nodiscard]] std::string_view line() {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + at_, left());
    const std::size_t end = rest.find('\n');
    if (end == std::string_view::npos) {
      throw Error(ErrorCode::incomplete, "the pickle ends inside a line of text");
    }
    std::string_view line = text(end + 1);
    line.remove_suffix(1);
    return line;
  }

  // The number that an argument is, or the length that it begins with.
  [[nodiscard]] std::uint64_t number(Argument form) {
    switch (form) {
      case Argument::number1:
      case Argument::sized1:
        return number<std::uint8_t>();
      case Argument::number2:
        return number<std::uint16_t>();
      case Argument::number4:
      case Argument::sized4:
        return number<std::uint32_t>();
      default:
        return number<std::uint64_t>();
    }
  }
  // What stands behind an argument's length.
  [[nodiscard]] ByteView bytes(Argument form) { return take(number(form)); }
  [[nodiscard]] std::string_view text(Argument form) { return text(number(form)); }

  void skip(Argument form) {
    if (form == Argument::none) return;
    if (form >= Argument::line) {
      (void)line();
      if (form == Argument::two_lines) (void)line();
      return;
    }
    const std::uint64_t value = number(form);
    if (form >= Argument::sized1) (void)take(value);
  }

  // From now on what crosses the end of its frame is read all the same, as Python's machine in C
  // does; take_crossing() tells of each.
  void allow_crossing() noexcept { lenient_ = true; }
  [[nodiscard]] bool take_crossing() noexcept { return std::exchange(crossed_, false); }

  void enter_frame(std::uint64_t size) {
    if (frame_end_ != kNoFrame) throw Error(ErrorCode::corrupt, "a frame begins inside a frame");
    if (size > left()) truncated(size);
    if (size != 0) frame_end_ = at_ + size;
  }

 private:
  static constexpr std::size_t kNoFrame = std::numeric_limits<std::size_t>::max();

  [[noreturn]] void truncated(std::uint64_t size) const {
    throw Error(ErrorCode::incomplete, "the pickle has " + std::to_string(left()) +
                                           " bytes left, expected " + std::to_string(size));
  }

  void cross_frame() {
    if (!lenient_) throw Error(ErrorCode::corrupt, "an opcode crosses the end of its frame");
    crossed_ = true;
    frame_end_ = kNoFrame;
  }

  ByteView bytes_;
  bool lenient_ = false;
  bool crossed_ = false;
  std::size_t at_ = 0;
  std::size_t frame_end_ = kNoFrame;
};

}  // namespace tessera::pickle
