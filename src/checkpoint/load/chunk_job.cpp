#include "checkpoint/load/chunk_job.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/load/piece_job.h"
#include "checkpoint/read/item_windows.h"
#include "checkpoint/read/memory.h"
#include "layout/boxes.h"

namespace tessera {
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
