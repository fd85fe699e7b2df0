#include "checkpoint/read/item_windows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/crc32.h"
#include "checkpoint/read/storage_checks.h"
#include "checkpoint/read/zstd.h"
#include "format/torch/torch_file.h"
#include "io/source.h"
#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kTailStep = 64 << 10;

// An archive without its elements, which read as zeros.
class Hollow final : public ByteSource {
 public:
  Hollow(std::string name, std::vector<std::byte> head, std::uint64_t elements,
         std::vector<std::byte> tail)
      : name_(std::move(name)),
        head_(std::move(head)),
        tail_(std::move(tail)),
        tail_at_(head_.size() + elements) {}

  [[nodiscard]] std::uint64_t size() const override { return tail_at_ + tail_.size(); }
  [[nodiscard]] const std::string& name() const override { return name_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    std::ranges::fill(out, std::byte{0});
    copy_common(head_, 0, offset, out);
    copy_common(tail_, tail_at_, offset, out);
  }

 private:
  static void copy_common(ByteView bytes, std::uint64_t at, std::uint64_t offset,
                          MutableByteView out) {
    const std::uint64_t begin = std::max(at, offset);
    const std::uint64_t end = std::min(at + bytes.size(), offset + out.size());
    if (begin >= end) return;
    std::memcpy(out.data() + (begin - offset), bytes.data() + (begin - at),
                static_cast<std::size_t>(end - begin));
  }

  std::string name_;
  std::vector<std::byte> head_;
  std::vector<std::byte> tail_;
  std::uint64_t tail_at_;
};

// The bytes before the elements in the file that torch.save makes of a tensor of its own.
std::vector<std::byte> usual_head(DType dtype, const Shape& sizes) {
  Tensor plain;
  plain.dtype = dtype;
  plain.shape = sizes;
  const Value tree(std::move(plain));
  const torch_file::Writer archive(tree, "archive");
  std::vector<std::byte> head(static_cast<std::size_t>(archive.slots().at(0).offset));
  for (const auto& segment : archive.fixed()) {
    if (segment.offset >= head.size()) continue;
    std::ranges::copy(segment.bytes, head.begin() + static_cast<std::ptrdiff_t>(segment.offset));
  }
  return head;
}

class Item {
 public:
  Item(const Tensor& tensor, const Piece& piece, const std::string& name)
      : tensor_(tensor),
        piece_(piece),
        name_(name),
        sizes_(std::get<Box>(piece.slice).sizes),
        element_(size_of(tensor.stored.value_or(tensor.dtype))),
        stream_(slice_source(piece.storage->source, piece.storage->offset, piece.storage->size),
                most_in_item(tensor, piece)) {}

  bool begins_as_usual() {
    head_ = usual_head(tensor_.stored.value_or(tensor_.dtype), sizes_);
    std::vector<std::byte> found(head_.size());
    located([&] { found.resize(stream_.read(found)); });
    return found == head_;
  }

  void visit_elements(std::size_t window, const VisitWindow& visit) {
    const std::int64_t count = numel(sizes_);
    const auto step = static_cast<std::int64_t>(std::max<std::size_t>(window / element_, 1));
    const auto storage = std::make_shared<Storage>();
    std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(step, count)) * element_);
    storage->data = bytes.data();
    storage->size = bytes.size();
    for (std::int64_t begin = 0; begin < count; begin += step) {
      const std::int64_t end = std::min(begin + step, count);
      const auto part =
          MutableByteView(bytes).first(static_cast<std::size_t>(end - begin) * element_);
      located([&] { read_all_of(part); });
      crc_ = crc32(part, crc_);
      visit(window_of({begin, end}, storage));
    }
  }

  // After all elements. Adds what was read.
  void require_as_described(IoReport& report) {
    located([&] { require_description(report); });
  }

 private:
  // Says of an error where the item is.
  template <typename Step>
  void located(Step step) const {
    try {
      step();
    } catch (Error& error) {
      const Storage& storage = *piece_.storage;
      throw error.at_path(storage.source->name()).at_key(name_).at_offset(storage.offset);
    }
  }

  void read_all_of(MutableByteView out) {
    if (stream_.read(out) == out.size()) return;
    throw Error(ErrorCode::incomplete, "the item ends within its elements");
  }

  void require_description(IoReport& report) {
    const auto elements = static_cast<std::uint64_t>(numel(sizes_)) * element_;
    const std::uint64_t begin = head_.size();
    const std::string path = piece_.storage->source->name();
    const Tensor item = torch_file::read_tensor_item(
        std::make_shared<Hollow>(path, std::move(head_), elements, tail()));
    require_item(tensor_, piece_, item, name_);
    const Storage& storage = *item.pieces.at(0).storage;
    if (storage.offset != begin || storage.size != elements)
      throw Error(ErrorCode::corrupt, "the item's directory has its elements elsewhere");
    if (has_crc(storage)) require_crc(storage, crc_, name_);
    report.bytes_read += piece_.storage->size;
    if (!has_crc(storage) && !piece_.storage->source->checked())
      report.bytes_unchecked += piece_.storage->size;
  }

  // The elements of a range of the item, each box of them where it lies in `storage`.
  Tensor window_of(const FlatRange& range, const std::shared_ptr<Storage>& storage) const {
    Tensor window;
    window.dtype = tensor_.dtype;
    window.stored = tensor_.stored;
    window.shape = tensor_.shape;
    const Shape& origin = std::get<Box>(piece_.slice).offsets;
    std::int64_t at = 0;
    for (Box& box : boxes_of(range, sizes_)) {
      const std::int64_t count = numel(box.sizes);
      for (std::size_t d = 0; d < origin.size(); ++d) box.offsets[d] += origin[d];
      window.pieces.push_back({std::move(box), storage, at, {}, -1});
      at += count;
    }
    return window;
  }

  std::vector<std::byte> tail() {
    std::vector<std::byte> tail;
    std::size_t got = kTailStep;
    while (got == kTailStep) {
      tail.resize(tail.size() + kTailStep);
      got = stream_.read(MutableByteView(tail).last(kTailStep));
      tail.resize(tail.size() - kTailStep + got);
    }
    return tail;
  }

  const Tensor& tensor_;
  const Piece& piece_;
  const std::string& name_;
  const Shape& sizes_;
  const std::size_t element_;  // bytes of one as it is stored
  ZstdStream stream_;
  std::vector<std::byte> head_;
  std::uint32_t crc_ = 0;  // of the elements so far
};

}  // namespace

bool visit_item(const Tensor& tensor, const Piece& piece, const std::string& name,
                std::size_t window, const VisitWindow& visit, IoReport& report) {
  Item item(tensor, piece, name);
  if (!item.begins_as_usual()) return false;
  item.visit_elements(window, visit);
  item.require_as_described(report);
  return true;
}

}  // namespace tessera
