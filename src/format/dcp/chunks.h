// The chunks of a tensor (checkpoint-rows F-03), in columns: a large job has millions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/layout.h"

namespace tessera::dcp {

// The place of one item: a byte range of a data file (StorageInfo).
struct Item {
  std::string path;  // relative to the checkpoint's directory; never leaves it
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::vector<std::string> transforms;  // stream extensions, outermost first ("stream.zstd/1")
};

// An item whose texts belong to somebody else.
struct ItemView {
  std::string_view path;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::span<const std::string> transforms = {};
};

struct Chunk {
  Box box;
  Item item;
};

// Paths and lists of transforms, by number. Number 0 is the empty one of each. What was added stays
// where it is.
class ItemTexts {
 public:
  ItemTexts();
  ItemTexts(const ItemTexts&) = delete;
  ItemTexts& operator=(const ItemTexts&) = delete;

  [[nodiscard]] std::uint32_t path_number(std::string_view path);
  [[nodiscard]] const std::string& path(std::uint32_t number) const { return paths_[number]; }
  [[nodiscard]] std::uint32_t transforms_number(std::span<const std::string> transforms);
  [[nodiscard]] const std::vector<std::string>& transforms(std::uint32_t number) const {
    return *transforms_[number];
  }

 private:
  std::deque<std::string> paths_;
  std::unordered_map<std::string_view, std::uint32_t> path_numbers_;  // into `paths_`
  std::size_t last_path_ = 0;  // the number that was given last
  std::map<std::vector<std::string>, std::uint32_t> transforms_numbers_;
  std::vector<const std::vector<std::string>*> transforms_;  // into the keys of those
};

// A sequence of chunks, in `.metadata` order. Its members are made when they are asked for, so an
// iterator gives values. All boxes of a sequence have the same number of dimensions. Sequences may
// share their texts, and copies do: then one thread at a time may change any of them.
class Chunks {
 public:
  class Iterator;

  Chunks() = default;
  // With these texts, which other sequences may use, too.
  explicit Chunks(std::shared_ptr<ItemTexts> texts) : texts_(std::move(texts)) {}

  [[nodiscard]] std::size_t size() const noexcept { return offsets_.size(); }
  [[nodiscard]] bool empty() const noexcept { return offsets_.empty(); }

  // No chunk has this number: undefined. The views hold until the sequence changes.
  [[nodiscard]] Chunk operator[](std::size_t number) const;
  [[nodiscard]] std::span<const std::int64_t> box_offsets(std::size_t number) const {
    return std::span(boxes_).subspan(2 * dims_ * number, dims_);
  }
  [[nodiscard]] std::span<const std::int64_t> box_sizes(std::size_t number) const {
    return std::span(boxes_).subspan(2 * dims_ * number + dims_, dims_);
  }
  [[nodiscard]] ItemView item(std::size_t number) const;
  // What has an item has the path of a data file.
  [[nodiscard]] bool has_item(std::size_t number) const { return paths_[number] != 0; }

  [[nodiscard]] Iterator begin() const;
  [[nodiscard]] Iterator end() const;

  // Throws `invalid_argument` for a box of another number of dimensions.
  void push_back(const Chunk& chunk);
  // A chunk without an item.
  void push_back(std::span<const std::int64_t> offsets, std::span<const std::int64_t> sizes);
  void set(std::size_t number, const Chunk& chunk);
  void set_item(std::size_t number, const ItemView& item);
  // Gives the chunks these texts. None may have an item.
  void use_texts(std::shared_ptr<ItemTexts> texts) { texts_ = std::move(texts); }

 private:
  void require_dims(std::size_t offsets, std::size_t sizes) const;

  std::size_t dims_ = 0;              // of each box
  std::vector<std::int64_t> boxes_;   // offsets and sizes of each
  std::vector<std::uint32_t> paths_;  // numbers
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> lengths_;
  std::vector<std::uint32_t> transforms_;  // numbers; empty: no item has any
  std::shared_ptr<ItemTexts> texts_;       // shared by the tensors of a checkpoint; null: no item
};

class Chunks::Iterator {
 public:
  using value_type = Chunk;
  using difference_type = std::ptrdiff_t;
  using iterator_concept = std::input_iterator_tag;

  Iterator() = default;
  Iterator(const Chunks& chunks, std::size_t number) : chunks_(&chunks), number_(number) {}
  Chunk operator*() const { return (*chunks_)[number_]; }
  Iterator& operator++() {
    ++number_;
    return *this;
  }
  Iterator operator++(int) {
    Iterator before = *this;
    ++number_;
    return before;
  }
  bool operator==(const Iterator&) const = default;

 private:
  const Chunks* chunks_ = nullptr;
  std::size_t number_ = 0;
};

inline Chunks::Iterator Chunks::begin() const {
  return {*this, 0};
}
inline Chunks::Iterator Chunks::end() const {
  return {*this, size()};
}

}  // namespace tessera::dcp
