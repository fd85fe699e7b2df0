// Items as zstd frames (checkpoint-rows P-23), compressed on their way into a data file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/io.h"

namespace tessera {

// The name of PyTorch's stream extension, as `.metadata` has it of each item.
inline constexpr const char* kZstdTransform = "stream.zstd/1";

// Levels whose windows every reader takes, ours too (zstd_source.h).
inline constexpr int kLowestZstdLevel = 1;
inline constexpr int kHighestZstdLevel = 19;

// Compresses what is written to it, one frame after another. Memory is bounded by the level and the
// window, whatever is written. Of one thread.
class ZstdSink final : public ByteSink {
 public:
  // `window`: bytes that are written to the other sink at once, at most.
  ZstdSink(int level, std::size_t window);
  ~ZstdSink() override;

  // The next frame lies at `at` of `out`, and its content will have `size` bytes.
  void begin(ByteSink& out, std::uint64_t at, std::uint64_t size);
  // Of the content, from its first byte to its last without a gap.
  void write_at(std::uint64_t offset, ByteView bytes) override;
  // After the last byte. Returns the frame's length.
  std::uint64_t end();

  void commit() override {}
  [[nodiscard]] const std::string& name() const override { return out_->name(); }

 private:
  struct Encoder;
  void flush();

  std::unique_ptr<Encoder> encoder_;
  std::size_t window_;
  ByteSink* out_ = nullptr;
  std::uint64_t begin_ = 0;    // of the frame in `out_`
  std::uint64_t flushed_ = 0;  // bytes of the frame that are there
  std::uint64_t content_ = 0;  // bytes of the content so far
  std::vector<std::byte> buffer_;
  std::size_t filled_ = 0;  // bytes of buffer_
};

}  // namespace tessera
