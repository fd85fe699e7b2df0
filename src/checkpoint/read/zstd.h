// The content of zstd frames: from front to back, as a source, as an item of DCP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera {

// The content from front to back.

// The content of the frames that make up `frames`. Memory is bounded whatever the size. It belongs
// to one thread. Each member throws `limit` when the content is longer than `cap` or needs a window
// of more than 16 MiB, `corrupt` for bytes that are not zstd, `incomplete` for a frame that ends
// too early.
class ZstdStream {
 public:
  ZstdStream(std::shared_ptr<const ByteSource> frames, std::uint64_t cap);
  ~ZstdStream();

  // The next bytes of the content. Returns fewer than `out` has room for only at its end.
  std::size_t read(MutableByteView out);
  // Goes to a byte of the content: forward from where it is, or from the start.
  void go_to(std::uint64_t position);
  // Bytes of the content that have been passed.
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }
  [[nodiscard]] const ByteSource& frames() const noexcept { return *frames_; }

 private:
  struct Decoder;
  void refill();
  std::size_t decode(MutableByteView out);
  [[noreturn]] void fail(std::size_t code) const;

  std::shared_ptr<const ByteSource> frames_;
  std::uint64_t cap_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<std::byte> input_;
  std::size_t begin_ = 0;       // of what is unread in input_
  std::size_t end_ = 0;         // of what is in input_
  std::uint64_t consumed_ = 0;  // of frames_
  std::uint64_t position_ = 0;
  bool inside_ = false;  // a frame
};

// The content as a source.

// The content of the frames that make up `frames`, decompressed as it is read; memory is bounded
// whatever the size. Making it goes over all frames once and keeps both ends of the content in
// memory. Reading backwards between them begins again at the start. Throws as ZstdStream does.
[[nodiscard]] std::shared_ptr<const ByteSource> zstd_source(
    std::shared_ptr<const ByteSource> frames, std::uint64_t cap);

// Limits of an item of DCP.

// The most bytes that the archive of `piece`, a piece of `tensor`, may have once it is
// decompressed.
[[nodiscard]] std::uint64_t most_in_item(const Tensor& tensor, const Piece& piece);

// Throws `corrupt` when the item of `piece` turned out to hold another shape or dtype than `tensor`
// says.
void require_item(const Tensor& tensor, const Piece& piece, const Tensor& item,
                  const std::string& name);

}  // namespace tessera
