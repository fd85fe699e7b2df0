// The tail of a data file that we write: the digests of its blocks and items, behind its last item
// (docs/formats/side-file.md). One digest of the tail stands for the whole file.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checked_source.h"
#include "tessera/io.h"

namespace tessera {

// All that has to be known of a data file to check every byte of it.
struct DataDigest {
  std::uint64_t size = 0;  // bytes, with the tail
  std::uint64_t tail = 0;  // the tail's digest
};

// Bytes of the tail behind `items` items that end at `end`.
[[nodiscard]] std::uint64_t tail_size(std::uint64_t end, std::uint64_t items);

// A sink of items one after another, which adds the tail. Items are written by any threads, and
// end_item() and finish() are called when they are done.
class TailedSink final : public ByteSink {
 public:
  explicit TailedSink(std::unique_ptr<ByteSink> sink);
  ~TailedSink() override;

  void write_at(std::uint64_t offset, ByteView bytes) override;
  // The item that began where the one before ended reaches to `end`.
  void end_item(std::uint64_t end);
  // Writes the tail behind the last item. Once, before commit.
  DataDigest finish();
  void commit() override { sink_->commit(); }
  [[nodiscard]] const std::string& name() const override { return sink_->name(); }

 private:
  std::unique_ptr<ByteSink> sink_;
  BlockDigests blocks_;
  std::unique_ptr<BlockDigests> item_;  // of the item that is being written
  std::uint64_t end_ = 0;               // of the last whole item
  Digests items_;
};

// The digests of the items, in the file's order. Throws `corrupt` as the source below does.
[[nodiscard]] Digests read_item_digests(const ByteSource& source, const DataDigest& digest);

// A source that checks what is read of a data file. The tail is read with the first byte; if it
// is not the recorded one or does not fit the file, that is `corrupt` where the tail begins.
[[nodiscard]] std::shared_ptr<ByteSource> tailed_source(std::shared_ptr<const ByteSource> source,
                                                        const DataDigest& digest);

}  // namespace tessera
