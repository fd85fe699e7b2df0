// What every source needs: the check of a range, a base of sources in front of others, bytes that
// somebody else owns, how an object begins.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {

// The range check that every source makes.

// Throws `incomplete` when the source ends before `offset + size`. `origin` is where the source
// begins in the object that it is named after.
inline void require_range(const ByteSource& source, std::uint64_t offset, std::uint64_t size,
                          std::uint64_t origin = 0) {
  const std::uint64_t have = source.size();
  if (offset <= have && size <= have - offset) return;
  throw Error(ErrorCode::incomplete, "found the end at byte " + std::to_string(origin + have) +
                                         ", expected " + std::to_string(size) + " bytes here")
      .at_path(source.name())
      .at_offset(origin + offset);
}

// A source in front of another one with the same bytes: hands everything on. Derive from it to
// change what is different.

class ForwardingSource : public ByteSource {
 public:
  explicit ForwardingSource(std::shared_ptr<const ByteSource> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] std::uint64_t size() const override { return inner_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    inner_->read_at(offset, out);
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    inner_->read_ranges(ranges);
  }
  [[nodiscard]] const std::string& name() const override { return inner_->name(); }
  [[nodiscard]] std::string version() const override { return inner_->version(); }
  [[nodiscard]] std::string identity() const override { return inner_->identity(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return inner_->request_cost(); }
  [[nodiscard]] bool checked() const override { return inner_->checked(); }
  [[nodiscard]] std::shared_ptr<std::byte[]> map() const override { return inner_->map(); }
  [[nodiscard]] const ByteSource& original() const override { return inner_->original(); }

 protected:
  [[nodiscard]] const ByteSource& inner() const { return *inner_; }

 private:
  std::shared_ptr<const ByteSource> inner_;
};

// Bytes in memory that somebody else owns, as a source.

// The bytes outlive the source.
[[nodiscard]] std::shared_ptr<ByteSource> borrowed_source(ByteView bytes, std::string name);

// What a source of slice_source() is a part of, and where it begins there; any other is whole.
struct SourcePart {
  const ByteSource& of;
  std::uint64_t offset = 0;
};
[[nodiscard]] SourcePart part_of(const ByteSource& source);

// How an object begins, which tells formats apart.

// The first `Size` bytes; zeros behind the object's end.
template <std::size_t Size>
[[nodiscard]] std::array<unsigned char, Size> head_of(const ByteSource& source) {
  std::array<unsigned char, Size> head{};
  const auto have = static_cast<std::size_t>(std::min<std::uint64_t>(Size, source.size()));
  source.read_at(0, std::as_writable_bytes(std::span(head)).first(have));
  return head;
}

}  // namespace tessera
