// Items as zstd frames (checkpoint-rows P-23), compressed on their way into a data file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "format/dcp/dcp.h"
#include "format/torch/torch_file.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera {

// The name of PyTorch's stream extension, as `.metadata` has it of each item.
inline constexpr const char* kZstdTransform = "stream.zstd/1";

// Levels whose windows every reader takes, ours too (read/zstd.h).
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
  // The content comes from its first byte to its last without a gap.
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

// Writes DCP items (checkpoint-rows F-03b) one after another into a data file.

// Gives the elements [begin, begin + count) of the tensor that is being written, in row-major
// order; `scratch` may be used to hold them. The view is read before the next call.
using ElementSource =
    std::function<ByteView(std::int64_t begin, std::int64_t count, MutableByteView scratch)>;

// Writes the elements of the tensor that is being written at `at` of `sink`, which is the data file
// or compresses into it, and returns the CRC-32 of their bytes.
using ElementWriter = std::function<std::uint32_t(ByteSink& sink, std::uint64_t at)>;

class ItemWriter {
 public:
  // `window`: bytes per step, at most. With a `zstd_level` each item is a zstd frame around its
  // archive (checkpoint-rows P-23).
  ItemWriter(ByteSink& sink, std::string path, std::size_t window,
             std::optional<int> zstd_level = {});
  ~ItemWriter();

  // A torch.save archive of one tensor of this dtype and shape. As in what PyTorch writes it needs
  // no gradient, which .metadata alone says: torch.load fails for a few dtypes where it does.
  dcp::Item tensor(DType dtype, const Shape& shape, const ElementSource& elements);
  dcp::Item tensor(DType dtype, const Shape& shape, const ElementWriter& elements);
  // A torch.save archive of a value. Tensors in it are copied window by window, wherever they are.
  dcp::Item value(const Value& value);
  // An archive that somebody else has made. It is written as it is.
  dcp::Item archive(ByteView bytes);
  [[nodiscard]] std::uint64_t written() const noexcept { return offset_; }
  // Bytes of the last item's archive, before it was compressed.
  [[nodiscard]] std::uint64_t archive_size() const noexcept { return archive_size_; }

 private:
  // Writes the bytes of a slot of an archive at `at` of `sink`; returns their CRC-32.
  using SlotWriter = std::function<std::uint32_t(ByteSink& sink, std::uint64_t at,
                                                 const torch_file::Writer::Slot& slot)>;
  // Small archives are gathered in memory first, or go straight to the sink: to callers who tell
  // others where in which file their elements are.
  enum class Way : std::uint8_t { gathered, straight };
  dcp::Item made(torch_file::Writer archive, Way way, const SlotWriter& write_slot);
  // The archive of a tensor without elements. Models have few shapes and many tensors, so it is
  // kept.
  const torch_file::Writer& archive_of(DType dtype, const Shape& shape);
  // A window, or less for an item of fewer bytes.
  MutableByteView scratch_for(std::uint64_t bytes);

  ByteSink& sink_;
  std::string path_;          // of the data file, as .metadata names it
  std::uint64_t offset_ = 0;  // where the next item begins
  std::uint64_t archive_size_ = 0;
  std::size_t window_;
  std::unique_ptr<ZstdSink> zstd_;  // null: items are written as they are
  std::vector<std::byte> scratch_;
  struct Unfilled;
  std::map<std::pair<DType, Shape>, std::unique_ptr<Unfilled>> archives_;
  std::vector<std::byte> small_;  // a small archive, until it is written
};

// Writes the storages' bytes of one slot of an archive at `base`, window by window, and returns
// their CRC-32.
std::uint32_t write_elements(ByteSink& sink, std::uint64_t at, std::int64_t count,
                             std::size_t element, const ElementSource& elements,
                             MutableByteView scratch);

// Copies a storage of plain bytes to `at` of `sink` and returns its CRC-32, after comparing it with
// the recorded one. `progress` hears of the bytes as they go.
std::uint32_t write_storage(ByteSink& sink, std::uint64_t at, const Storage& storage,
                            MutableByteView scratch,
                            const std::function<void(std::size_t)>& progress = {});

}  // namespace tessera
