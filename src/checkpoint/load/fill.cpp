#include "checkpoint/load/fill.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>

#include "base/parallel.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/gather.h"
#include "checkpoint/read/memory.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/device_windows.h"
#include "value/lazy_bits.h"

namespace tessera {
namespace {

// Where a byte is: addresses of two devices say nothing about each other.
struct Place {
  std::string_view device;  // empty: the host
  std::uintptr_t address = 0;
  bool operator==(const Place&) const = default;
  bool operator<(const Place& other) const {
    return std::tie(device, address) < std::tie(other.device, other.address);
  }
};

// A piece and the bytes between its first element and its last.
struct Extent {
  PieceOf of;
  const Tensor* tensor = nullptr;
  const Piece* piece = nullptr;
  Place begin;
  Place end;
  bool dense = true;  // all of these bytes are the piece's

  [[nodiscard]] bool same_array(const Extent& other) const {
    return begin == other.begin && tensor->dtype == other.tensor->dtype &&
           tensor->shape == other.tensor->shape && piece->slice == other.piece->slice &&
           strides_of(*piece) == strides_of(*other.piece);
  }
};

Place place_of(const Storage& storage) {
  if (storage.device) return {storage.device->device(), storage.device->address()};
  return {{}, reinterpret_cast<std::uintptr_t>(storage.data)};
}

Extent extent_of(PieceOf of, const Tensor& tensor, const Piece& piece) {
  const std::size_t element = size_of(tensor.dtype);
  const Shape sizes = array_of(piece.slice);
  const std::int64_t reach = strided_reach(sizes, strides_of(piece));
  Place begin = place_of(*piece.storage);
  begin.address += static_cast<std::size_t>(piece.storage_offset) * element;
  Place end = begin;
  end.address += static_cast<std::size_t>(reach) * element;
  return {of, &tensor, &piece, begin, end, reach == numel(sizes)};
}

std::vector<Extent> extents_of(const std::vector<Filling>& fillings) {
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < fillings.size(); ++i) {
    const Tensor& tensor = fillings[i].wanted.as_tensor();
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      if (numel(tensor.pieces[p].slice) == 0) continue;
      extents.push_back(extent_of({i, p}, tensor, tensor.pieces[p]));
    }
  }
  return extents;
}

constexpr std::size_t kDirectWindow = 4 << 20;  // bytes

// One piece of one tensor to fill, or to compare.
class PieceJob {
 public:
  PieceJob(const FillJob& job, PieceOf of)
      : job_(job),
        filling_(job.fillings[of.filling]),
        want_(filling_.wanted.as_tensor()),
        have_(filling_.found.as_tensor()),
        piece_(want_.pieces[of.piece]),
        sizes_(array_of(piece_.slice)),
        strides_(strides_of(piece_)),
        element_(size_of(want_.dtype)),
        first_(static_cast<std::size_t>(piece_.storage_offset) * element_) {}

  void fill() {
    const bool dense = strides_ == contiguous_strides(sizes_);
    if (piece_.storage->device) {
      dense ? fill_device() : fill_device_strided();
    } else {
      dense ? fill_dense() : fill_strided();
    }
  }

  // Also what lies on a device is brought here for it.
  void compare(const std::string& owner) {
    Tensor held = want_;
    held.pieces = {piece_};
    TensorReader reader(held, filling_.key, job_.tile);
    each_window(job_.window, [&](std::int64_t begin, std::int64_t part) {
      std::vector<std::byte>& expected = scratch_for(part);
      read(begin, part, expected.data());
      held_.resize(expected.size());
      reader.read(piece_.slice, begin, part, held_.data());
      if (held_ == expected) return;
      throw other_values(filling_.key, owner);
    });
  }

 private:
  using Visit = std::function<void(std::int64_t begin, std::int64_t part)>;

  // Visits the piece's elements by windows of at most so many bytes.
  void each_window(std::size_t window, const Visit& visit) {
    const std::int64_t count = numel(piece_.slice);
    const auto step = static_cast<std::int64_t>(window / std::max(element_, size_of(have_.dtype)));
    reader_.emplace(have_, filling_.key, job_.tile);
    for (std::int64_t begin = 0; begin < count; begin += step) {
      const std::int64_t part = std::min(step, count - begin);
      visit(begin, part);
      job_.meter.add(static_cast<std::uint64_t>(part) * element_);
    }
    if (job_.checks != nullptr) reader_->hand_over(*job_.checks);
    job_.counters.add(reader_->report());
  }

  // Elements of the checkpoint's tensor, as the wanted type.
  void read(std::int64_t begin, std::int64_t part, std::byte* out) {
    if (want_.dtype == have_.dtype) return reader_->read(piece_.slice, begin, part, out);
    raw_.resize(static_cast<std::size_t>(part) * size_of(have_.dtype));
    reader_->read(piece_.slice, begin, part, raw_.data());
    cast(have_.dtype, raw_.data(), want_.dtype, out, part);
  }

  // The same, as the piece's storage has them.
  void read_to_store(std::int64_t begin, std::int64_t part, std::byte* out) {
    read(begin, part, out);
    resolve_bits(piece_, want_.dtype, out, part);  // each bit is its own inverse
  }

  // What needs no cast is read straight into its place. Large windows have few ends inside of
  // blocks with one digest: such blocks are read into other memory first.
  void fill_dense() {
    const bool is_direct = want_.dtype == have_.dtype;
    const std::optional<std::int64_t> row = row_to_tell();
    each_window(is_direct ? std::max(job_.window, kDirectWindow) : job_.window,
                [&](std::int64_t begin, std::int64_t part) {
                  std::byte* place =
                      piece_.storage->data + first_ + static_cast<std::size_t>(begin) * element_;
                  read_to_store(begin, part, place);
                  if (row) {
                    job_.filled(filling_.key, want_, *row + begin,
                                {place, static_cast<std::size_t>(part) * element_});
                  }
                });
  }

  // The number of the piece's first element in the tensor, if whoever listens can be told of it.
  [[nodiscard]] std::optional<std::int64_t> row_to_tell() const {
    if (!job_.filled || want_.dtype != have_.dtype || piece_.conj || piece_.neg) return {};
    const RunSequence runs(piece_.slice, want_.shape);
    return runs.size() == 1 ? std::optional(runs[0].global) : std::nullopt;
  }

  void fill_strided() {
    each_window(job_.window, [&](std::int64_t begin, std::int64_t part) {
      const std::byte* from = scratch_for(part).data();
      read_to_store(begin, part, scratch_.data());
      for_each_strided_run(
          sizes_, strides_, begin, part, [&](std::int64_t position, std::int64_t run) {
            const std::size_t bytes = static_cast<std::size_t>(run) * element_;
            std::memcpy(
                piece_.storage->data + first_ + static_cast<std::size_t>(position) * element_, from,
                bytes);
            from += bytes;
          });
    });
  }

  // While a window is on its way to the device, the next one is read.
  void fill_device() {
    DeviceWriter writer(piece_.storage->device);
    each_window(job_.window, [&](std::int64_t begin, std::int64_t part) {
      const std::size_t size = static_cast<std::size_t>(part) * element_;
      read_to_store(begin, part, writer.room(size).data());
      writer.send(first_ + static_cast<std::size_t>(begin) * element_, size);
    });
    writer.finish();
  }

  // By tiles: of a transposed piece each has longer runs for the device.
  void fill_device_strided() {
    DeviceWriter writer(piece_.storage->device);
    GatherScratch scratch;
    std::vector<WriteRange> writes;
    const auto write = [&](std::span<ReadRange> ranges) {
      writes.clear();
      for (const ReadRange& range : ranges) writes.push_back({range.offset, range.out});
      writer.write_ranges(writes);
    };
    const Shape dense = contiguous_strides(sizes_);
    each_window(job_.tile, [&](std::int64_t begin, std::int64_t part) {
      read_to_store(begin, part, scratch_for(part).data());
      for (const Box& box : boxes_of({begin, begin + part}, sizes_))
        scatter(move_of(box, strides_, dense, -begin), element_, first_, scratch_.data(), write,
                scratch);
    });
    writer.finish();
  }

  std::vector<std::byte>& scratch_for(std::int64_t count) {
    scratch_.resize(static_cast<std::size_t>(count) * element_);
    return scratch_;
  }

  const FillJob& job_;
  const Filling& filling_;
  const Tensor& want_;
  const Tensor& have_;
  const Piece& piece_;
  Shape sizes_;
  Shape strides_;
  std::size_t element_;
  std::size_t first_;  // byte of the storage
  std::optional<TensorReader> reader_;
  std::vector<std::byte> raw_;      // elements as the checkpoint has them
  std::vector<std::byte> scratch_;  // as the piece has them
  std::vector<std::byte> held_;     // what the piece holds
};

// The dense pieces, by their begin, each of which has memory of its own.
class ApartPieces {
 public:
  explicit ApartPieces(const std::vector<Filling>& fillings) : fillings_(fillings) {}

  void add(const Extent& extent) {
    const bool same = furthest_ != nullptr && furthest_->end.device == extent.begin.device;
    if (same && extent.begin < furthest_->end) {
      throw Error(ErrorCode::invalid_argument, "the memory of '" + key_of(*furthest_) +
                                                   "' and of '" + key_of(extent) + "' overlaps")
          .at_key(key_of(extent));
    }
    if (!same || furthest_->end < extent.end) furthest_ = &extent;
  }

 private:
  [[nodiscard]] const std::string& key_of(const Extent& extent) const {
    return fillings_[extent.of.filling].key;
  }

  const std::vector<Filling>& fillings_;
  const Extent* furthest_ = nullptr;  // who reaches furthest
};

Owners each_its_own(const std::vector<Filling>& fillings) {
  Owners owners(fillings.size());
  for (std::size_t i = 0; i < fillings.size(); ++i) {
    for (std::size_t p = 0; p < fillings[i].wanted.as_tensor().pieces.size(); ++p)
      owners[i].push_back({i, p});
  }
  return owners;
}

}  // namespace

Error other_values(const std::string& key, const std::string& owner) {
  return Error(ErrorCode::mismatch,
               "one memory for two keys, and the checkpoint has other values here than under '" +
                   owner + "'")
      .at_key(key);
}

std::uint64_t bytes_of(const std::vector<Filling>& fillings) {
  std::uint64_t bytes = 0;
  for (const Filling& filling : fillings) {
    const Tensor& tensor = filling.wanted.as_tensor();
    for (const Piece& piece : tensor.pieces)
      bytes += static_cast<std::uint64_t>(numel(piece.slice)) * size_of(tensor.dtype);
  }
  return bytes;
}

Owners owners_of(const std::vector<Filling>& fillings) {
  Owners owners = each_its_own(fillings);
  std::vector<Extent> extents = extents_of(fillings);
  std::stable_sort(extents.begin(), extents.end(),
                   [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  std::map<Place, std::vector<const Extent*>> firsts;  // by begin: those that differ
  ApartPieces apart(fillings);
  for (const Extent& extent : extents) {
    std::vector<const Extent*>& here = firsts[extent.begin];
    const auto same = std::find_if(here.begin(), here.end(), [&extent](const Extent* other) {
      return other->same_array(extent);
    });
    if (same != here.end()) {
      owners[extent.of.filling][extent.of.piece] = (*same)->of;
      continue;
    }
    here.push_back(&extent);
    if (extent.dense) apart.add(extent);
  }
  return owners;
}

void fill_all(const FillJob& job) {
  std::vector<PieceOf> own;
  std::vector<PieceOf> others;
  for (std::size_t i = 0; i < job.fillings.size(); ++i) {
    const auto& pieces = job.fillings[i].wanted.as_tensor().pieces;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      if (numel(pieces[p].slice) == 0) continue;
      (job.owners[i][p] == PieceOf{i, p} ? own : others).push_back({i, p});
    }
  }
  parallel_for(job.threads, own.size(), [&](std::size_t i) { PieceJob(job, own[i]).fill(); });
  parallel_for(job.threads, others.size(), [&](std::size_t i) {
    const PieceOf& owner = job.owners[others[i].filling][others[i].piece];
    PieceJob(job, others[i]).compare(job.fillings[owner.filling].key);
  });
}

}  // namespace tessera
