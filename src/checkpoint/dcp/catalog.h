// Shapes and paths in messages between ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "comm/message.h"
#include "format/dcp/dcp.h"
#include "tessera/checkpoint.h"
#include "tessera/leaf.h"
#include "tessera/storage.h"
#include "tessera/value.h"

namespace tessera {

void write_shape(MessageWriter& message, const Shape& shape);
[[nodiscard]] Shape read_shape(MessageReader& message);

auto fields(FieldsOf<Placement> auto& placement) {
  return std::tie(placement.parts, placement.stride, placement.dim, placement.shard,
                  placement.begin);
}

void write_path(MessageWriter& message, const Path& path);
[[nodiscard]] Path read_path(MessageReader& message);

// The catalog of a DCP checkpoint: all that one rank learns when it opens it, as bytes from which
// others can load without asking the store for it again.
//
// A large job has millions of chunks. What is known of them stands in columns of equal width, so
// that nobody has to decode them all: who needs a chunk looks it up. Catalogs travel between the
// ranks of one job and are never stored.

// The place of an item, and its encoding.
struct ItemRange {
  std::uint32_t file = 0;  // its number in the catalog
  std::uint64_t offset = 0;
  std::uint64_t size = 0;  // bytes
  Encoding encoding = Encoding::raw;
};

// A data file. There may be as many as twice the ranks, and a rank needs few.
struct CatalogFile {
  ObjectInfo info;
  std::optional<FileDigests> digests = {};
  bool is_missing = false;  // `info` has the bytes that its items need
};

void write_file(MessageWriter& message, const CatalogFile& file);
[[nodiscard]] CatalogFile read_file(MessageReader& message);

// What is true of the checkpoint as a whole.
struct CatalogHead {
  std::string version;  // of PyTorch's planner
  std::string save_id;
  std::vector<std::string> warnings;
  std::vector<std::string> missing;  // data files that are named, and not there
  std::vector<std::string> idle;     // those that are there, and of which nothing is read
  std::string types;                 // of the tree, as the side file has them
  int world_size = 0;                // 0: not known
  std::vector<ObjectInfo> metadata;  // `.metadata`, or those of all ranks
  std::uint64_t metadata_end = 0;    // digest_of_end() of the first of them
  DigestsByName digests;             // of files that hold no item
};
// Tells a file from another save's without reading all of it: the end of a `.metadata` has the
// save's id, and that of an archive the checksums of what it holds.
[[nodiscard]] std::uint64_t digest_of_end(const ByteSource& file);
// Whether `found` is the first metadata file that the head tells of, and not another save's.
[[nodiscard]] bool is_metadata_of(const CatalogHead& head, const ByteSource& found);

// Collects the entries of a catalog, in their order.
class CatalogWriter {
 public:
  using Numbers = std::span<const std::int64_t>;

  CatalogWriter();
  // A tensor, whose chunks follow.
  void add_tensor(const dcp::EntryHead& head);
  void add_chunk(Numbers offsets, Numbers sizes, const ItemRange& place);
  // A value that holds no tensor, as a pickle.
  void add_value(const dcp::EntryHead& head, ByteView pickle);
  // A value that has to be read from its item.
  void add_item(const dcp::EntryHead& head, const ItemRange& place);
  // `files`: by their numbers.
  [[nodiscard]] Bytes finish(const CatalogHead& head, const std::vector<CatalogFile>& files);

 private:
  void add_head(const dcp::EntryHead& head);
  void end_tensor();

  MessageWriter bytes_;
  bool in_tensor_ = false;
  std::vector<std::vector<std::uint64_t>> columns_;  // of the tensor's chunks
};

// Numbers that are looked up in a catalog's bytes: `base`, or that and what each row has.
class CatalogColumn {
 public:
  CatalogColumn() = default;
  CatalogColumn(MessageReader& message, std::size_t rows);
  [[nodiscard]] std::uint64_t operator[](std::size_t row) const;

 private:
  ByteView rows_;
  std::uint64_t base_ = 0;
  std::uint8_t width_ = 0;  // bytes of a row
};

// The chunks of one tensor in a catalog.
class CatalogChunks {
 public:
  explicit CatalogChunks(MessageReader& message);

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] Box box(std::size_t number) const;
  [[nodiscard]] bool meets(std::size_t number, const Box& box) const;
  [[nodiscard]] ItemRange place(std::size_t number) const;

 private:
  [[nodiscard]] std::int64_t number(std::size_t column, std::size_t row) const {
    return static_cast<std::int64_t>(columns_[column][row]);
  }

  std::size_t size_ = 0;
  std::size_t dimensions_ = 0;
  std::vector<CatalogColumn> columns_;
};

class Catalog {
 public:
  // The bytes, which must outlive it, are those of a CatalogWriter of this job.
  explicit Catalog(ByteView bytes);

  struct Entry {
    dcp::EntryHead head;
    std::size_t chunks = 0;         // for chunks_at(); of tensors
    std::optional<ByteView> value;  // a pickle; of values, unless they are in their item
    std::optional<ItemRange> item;  // where such a value is
  };
  [[nodiscard]] const CatalogHead& head() const noexcept { return head_; }
  [[nodiscard]] std::size_t files() const noexcept { return files_; }
  [[nodiscard]] CatalogFile file(std::size_t number) const;
  // In the order of `.metadata`.
  void for_each(const std::function<void(const Entry& entry)>& visit) const;
  [[nodiscard]] CatalogChunks chunks_at(std::size_t position) const;

 private:
  ByteView entries_;
  CatalogHead head_;
  std::size_t files_ = 0;
  CatalogColumn records_;  // where each file's record begins in `file_records_`
  ByteView file_records_;
};

}  // namespace tessera
