#include "format/pickle/cursor.h"

#include <algorithm>
#include <limits>

#include "base/text.h"
#include "format/pickle/text.h"

namespace tessera::pickle {
namespace {

// The entry that GET means; larger than any pickle: none, and who reads the opcode says so.
std::uint64_t entry_of(std::string_view line) {
  try {
    return parse_index(line);
  } catch (const Error&) {
    return std::numeric_limits<std::uint64_t>::max();
  }
}

}  // namespace

void Cursor::truncated(std::uint64_t size) const {
  throw Error(ErrorCode::incomplete, "the pickle has " + std::to_string(left()) +
                                         " bytes left, expected " + std::to_string(size));
}

void Cursor::pass_limit(std::uint64_t size) {
  if (size > left()) truncated(size);
  if (!lenient_) throw Error(ErrorCode::corrupt, "an opcode crosses the end of its frame");
  crossed_ = true;
  leave_frame();
}

Survey::Survey(ByteView bytes) : size_(bytes.size()) {
  Cursor cursor(bytes);  // enters no frame
  try {
    follow(cursor);
  } catch (const Error&) {
    cut_ = true;
  }
  std::size_t count = 0;
  earlier_.reserve(recalled_.size());
  for (const std::uint64_t bits : recalled_) {
    earlier_.push_back(count);
    count += static_cast<unsigned>(std::popcount(bits));
  }
}

void Survey::follow(Cursor& cursor) {
  for (Op op{cursor.opcode()}; op != Op::stop; op = Op{cursor.opcode()}) {
    const Argument form = opcode_of(op).argument;
    if (form == Argument::not_an_opcode) return;
    if (is_one_of(op, Op::binget, Op::long_binget)) {
      note(cursor.number(form));
    } else if (op == Op::get) {
      note(entry_of(cursor.line()));
    } else {
      cursor.skip(form);
    }
  }
  end_ = cursor.at();
}

void Survey::note(std::uint64_t index) {
  if (index >= size_) return;  // more than there are
  const std::uint64_t word = index / 64;
  if (word >= recalled_.size()) recalled_.resize(std::max(word + 1, 2 * recalled_.size()));
  recalled_[word] |= std::uint64_t{1} << index % 64;
}

}  // namespace tessera::pickle
