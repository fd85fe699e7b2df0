// Reads a pickle's bytes forward, never past their end and never across the border of a frame.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "format/pickle/opcodes.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera::pickle {

class Cursor {
 public:
  explicit Cursor(ByteView bytes) : bytes_(bytes), limit_(bytes.size()) {}

  [[nodiscard]] std::size_t at() const noexcept { return at_; }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }

  // The opcode at the cursor. Leaves a frame that ends here.
  [[nodiscard]] std::uint8_t opcode() {
    if (at_ == limit_) leave_frame();
    return number<std::uint8_t>();
  }

  template <class T>
  [[nodiscard]] T number() {
    return load_le<T>(take(sizeof(T)).data());
  }

  [[nodiscard]] ByteView take(std::uint64_t size) {
    if (size > limit_ - at_) pass_limit(size);
    const ByteView taken = bytes_.subspan(at_, size);
    at_ += size;
    return taken;
  }

  [[nodiscard]] std::string_view text(std::uint64_t size) {
    const ByteView taken = take(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

  [[nodiscard]] std::byte byte_at(std::size_t at) const { return bytes_[at]; }
  // The text from `at` up to its newline, or up to the end.
  [[nodiscard]] std::string_view line_at(std::size_t at) const {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + at,
                                bytes_.size() - at);
    return rest.substr(0, rest.find('\n'));
  }
  // Goes to `at`, inside the bytes and outside of every frame, or inside the one that it is in.
  void jump(std::size_t at) noexcept { at_ = at; }
  [[nodiscard]] bool in_frame() const noexcept { return in_frame_; }

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
  [[nodiscard, gnu::always_inline]] std::uint64_t number(Argument form) {
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
    if (in_frame_) throw Error(ErrorCode::corrupt, "a frame begins inside a frame");
    if (size > left()) truncated(size);
    if (size == 0) return;
    limit_ = at_ + size;
    in_frame_ = true;
  }

 private:
  [[noreturn]] void truncated(std::uint64_t size) const;
  // What is taken passes the end of the bytes or of the frame: throws, or leaves the frame.
  void pass_limit(std::uint64_t size);
  void leave_frame() noexcept {
    limit_ = bytes_.size();
    in_frame_ = false;
  }

  ByteView bytes_;
  bool lenient_ = false;
  bool crossed_ = false;
  bool in_frame_ = false;
  std::size_t at_ = 0;
  std::size_t limit_;  // the end of the frame, or of the bytes
};

// One pass over a pickle's opcodes by their lengths alone, up to STOP: where they end, and which
// memo entries they take out again. Picklers number nearly all values and come back to few, so a
// machine keeps those alone.
class Survey {
 public:
  explicit Survey(ByteView bytes);

  // Up to and with STOP; 0: there is none.
  [[nodiscard]] std::size_t end() const noexcept { return end_; }
  // Whether the bytes end before STOP, and not at a byte that is no opcode.
  [[nodiscard]] bool is_cut() const noexcept { return cut_; }

  // Whether some opcode takes this entry out of the memo. Nothing is known of an index that is not
  // below the pickle's size: it counts as recalled.
  [[nodiscard]] bool is_recalled(std::uint64_t index) const noexcept {
    if (index >= size_) return true;
    return index / 64 < recalled_.size() && (recalled_[index / 64] >> index % 64 & 1U) != 0;
  }
  // How many entries below a recalled one, of which that is known, are recalled.
  [[nodiscard]] std::size_t recalled_before(std::uint64_t index) const noexcept {
    const std::uint64_t below = recalled_[index / 64] & ((std::uint64_t{1} << index % 64) - 1);
    return earlier_[index / 64] + static_cast<unsigned>(std::popcount(below));
  }

 private:
  void follow(Cursor& cursor);
  void note(std::uint64_t index);

  std::size_t size_;
  std::size_t end_ = 0;
  bool cut_ = false;
  std::vector<std::uint64_t> recalled_;  // bits
  std::vector<std::size_t> earlier_;     // for each 64 bits, how many are set before
};

}  // namespace tessera::pickle
