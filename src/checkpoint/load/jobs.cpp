#include "checkpoint/load/jobs.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "checkpoint/read/cast.h"
#include "checkpoint/read/gather.h"
#include "checkpoint/read/item_windows.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/meter.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr std::size_t kDirectWindow = 4 << 20;  // bytes
constexpr std::uint64_t kRequestsWorth = 64;    // bytes of a window for one that a request costs

class PieceJob {
 public:
  PieceJob(const FillJob& job, const Filling& filling, std::size_t piece)
      : job_(job),
        filling_(filling),
        want_(filling_.wanted.as_tensor()),
        have_(filling_.found.as_tensor()),
        piece_(want_.pieces[piece]),
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
    each_window(is_direct ? std::max(job_.window, direct_window()) : job_.window,
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

  // Far away a window is a few requests that are under way together.
  [[nodiscard]] std::size_t direct_window() const {
    const std::uint64_t worth = request_cost_of(have_) * kRequestsWorth;
    return std::max(kDirectWindow, static_cast<std::size_t>(worth));
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

  // The next window is read while one is on its way to the device.
  void fill_device() {
    DeviceWriter writer(piece_.storage->device);
    each_window(job_.window, [&](std::int64_t begin, std::int64_t part) {
      const std::size_t size = static_cast<std::size_t>(part) * element_;
      read_to_store(begin, part, writer.room(size).data());
      writer.send(first_ + static_cast<std::size_t>(begin) * element_, size);
    });
    writer.finish();
  }

  // The piece goes in tiles: one of a transposed piece has longer runs for the device.
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

}  // namespace

void carry_out(const FillJob& job, const PieceOf& of, const Filling& filling, std::size_t piece) {
  const PieceOf owner = job.owners[of.filling][of.piece];
  PieceJob work(job, filling, piece);
  if (owner == of) {
    work.fill();
  } else {
    work.compare(job.fillings[owner.filling].key);
  }
}

namespace {

bool is_compressed(const Piece& piece) {
  return piece.storage && piece.storage->encoding == Encoding::torch_item_zstd;
}

std::vector<Box> boxes_in(const Slice& slice, const Shape& shape) {
  if (const Box* box = std::get_if<Box>(&slice)) return {*box};
  return boxes_of(std::get<FlatRange>(slice), shape);
}

// `box`, a part of `piece`, as a piece of its own.
Piece part_of(const Piece& piece, const Box& box, const Shape& shape) {
  Shape strides = strides_of(piece);
  Shape origin(shape.size(), 0);
  std::int64_t at = 0;  // element of the piece's array that the box begins at
  if (const FlatRange* range = std::get_if<FlatRange>(&piece.slice)) {
    const std::int64_t step = strides.at(0);
    strides = contiguous_strides(shape);
    for (std::int64_t& stride : strides) stride *= step;
    at = -range->begin * step;
  } else {
    origin = std::get<Box>(piece.slice).offsets;
  }
  const Shape dense = contiguous_strides(box.sizes);
  Piece part = piece;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    at += (box.offsets[d] - origin[d]) * strides[d];
    if (box.sizes[d] == 1) strides[d] = dense[d];
  }
  part.storage_offset += at;
  part.slice = box;
  part.strides = std::move(strides);
  return part;
}

class PartsOfChunk {
 public:
  PartsOfChunk(const FillJob& job, const ChunkJob& chunk)
      : job_(job),
        chunk_(chunk),
        filling_(job.fillings[chunk.filling]),
        want_(filling_.wanted.as_tensor()) {}

  // Fills what lies in `window`, or compares it.
  void take(const Tensor& window) const {
    job_.meter.add(0);  // there may be nothing
    Filling filling{filling_.key, {}, Value(window)};
    for (const ChunkJob::Part& part : chunk_.parts) {
      for (const Piece& here : window.pieces) {
        const auto common = common_box(part.box, std::get<Box>(here.slice));
        if (!common) continue;
        Tensor wanted = want_;
        wanted.pieces = {part_of(want_.pieces[part.piece], *common, want_.shape)};
        filling.wanted = Value(std::move(wanted));
        carry_out(job_, {chunk_.filling, part.piece}, filling, 0);
      }
    }
  }

 private:
  const FillJob& job_;
  const ChunkJob& chunk_;
  const Filling& filling_;
  const Tensor& want_;
};

}  // namespace

std::vector<ChunkJob> chunk_jobs(const std::vector<Filling>& fillings, std::size_t filling,
                                 const std::vector<std::size_t>& pieces) {
  const Tensor& want = fillings[filling].wanted.as_tensor();
  const Tensor& have = fillings[filling].found.as_tensor();
  if (std::ranges::none_of(have.pieces, is_compressed)) return {};
  std::vector<ChunkJob> jobs;
  for (std::size_t c = 0; c < have.pieces.size(); ++c) jobs.push_back({filling, c});
  std::int64_t missing = 0;
  for (const std::size_t p : pieces) {
    for (const Box& box : boxes_in(want.pieces[p].slice, want.shape)) {
      missing += numel(box.sizes);
      for (ChunkJob& job : jobs) {
        const Box* chunk = std::get_if<Box>(&have.pieces[job.chunk].slice);
        if (chunk == nullptr) return {};
        const auto common = common_box(box, *chunk);
        if (!common) continue;
        missing -= numel(common->sizes);
        job.parts.push_back({p, *common});
      }
    }
  }
  if (missing != 0) return {};
  std::erase_if(jobs, [](const ChunkJob& job) { return job.parts.empty(); });
  return jobs;
}

void carry_out(const FillJob& job, const ChunkJob& chunk) {
  const Filling& filling = job.fillings[chunk.filling];
  const Tensor& have = filling.found.as_tensor();
  const Piece& piece = have.pieces[chunk.chunk];
  const PartsOfChunk parts(job, chunk);
  if (is_compressed(piece)) {
    IoReport read;
    const bool done = visit_item(
        have, piece, filling.key, job.window, [&](const Tensor& window) { parts.take(window); },
        read);
    job.counters.add(read);
    if (done) return;
  }
  Tensor alone = have;
  alone.pieces = {piece};
  parts.take(alone);
}

}  // namespace tessera
