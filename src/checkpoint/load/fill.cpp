#include "checkpoint/load/fill.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>

#include "base/parallel.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/memory.h"
#include "layout/boxes.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/lazy_bits.h"

namespace tessera {
namespace {

// A piece and the bytes between its first element and its last.
struct Extent {
  PieceOf of;
  const Tensor* tensor = nullptr;
  const Piece* piece = nullptr;
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool dense = true;  // all of these bytes are the piece's

  [[nodiscard]] bool same_array(const Extent& other) const {
    return begin == other.begin && tensor->dtype == other.tensor->dtype &&
           tensor->shape == other.tensor->shape && piece->slice == other.piece->slice &&
           strides_of(*piece) == strides_of(*other.piece);
  }
};

Extent extent_of(PieceOf of, const Tensor& tensor, const Piece& piece) {
  const std::size_t element = size_of(tensor.dtype);
  const Shape sizes = array_of(piece.slice);
  const std::int64_t reach = strided_reach(sizes, strides_of(piece));
  const std::byte* begin =
      piece.storage->data + static_cast<std::size_t>(piece.storage_offset) * element;
  return {of,
          &tensor,
          &piece,
          begin,
          begin + static_cast<std::size_t>(reach) * element,
          reach == numel(sizes)};
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
        first_(piece_.storage->data + static_cast<std::size_t>(piece_.storage_offset) * element_) {}

  void fill() {
    const bool in_place = want_.dtype == have_.dtype && strides_ == contiguous_strides(sizes_);
    run(in_place, [](std::byte* place, const std::byte* from, std::size_t bytes) {
      std::memcpy(place, from, bytes);
    });
  }

  void compare(const std::string& owner) {
    run(false, [&](const std::byte* place, const std::byte* from, std::size_t bytes) {
      if (std::memcmp(place, from, bytes) == 0) return;
      throw Error(ErrorCode::mismatch,
                  "one memory for two keys, and the checkpoint has other values here than under '" +
                      owner + "'")
          .at_key(filling_.key);
    });
  }

 private:
  using Visit = std::function<void(std::byte* place, const std::byte* from, std::size_t bytes)>;

  // Reads the piece window by window, straight into it or for `visit` to deal with.
  void run(bool in_place, const Visit& visit) {
    const std::int64_t count = numel(piece_.slice);
    const auto step =
        static_cast<std::int64_t>(job_.window / std::max(element_, size_of(have_.dtype)));
    TensorReader reader(have_, filling_.key, job_.tile);
    for (std::int64_t begin = 0; begin < count; begin += step) {
      const std::int64_t part = std::min(step, count - begin);
      if (in_place) {
        std::byte* const place = first_ + static_cast<std::size_t>(begin) * element_;
        reader.read(piece_.slice, begin, part, place);
        resolve_bits(piece_, want_.dtype, place, part);  // each bit is its own inverse
      } else {
        spread(reader, begin, part, visit);
      }
      job_.meter.add(static_cast<std::uint64_t>(part) * element_);
    }
    if (job_.checks != nullptr) reader.hand_over(*job_.checks);
    job_.counters.add(reader.report());
  }

  void spread(TensorReader& reader, std::int64_t begin, std::int64_t part, const Visit& visit) {
    const auto count = static_cast<std::size_t>(part);
    raw_.resize(count * size_of(have_.dtype));
    converted_.resize(count * element_);
    reader.read(piece_.slice, begin, part, raw_.data());
    cast(have_.dtype, raw_.data(), want_.dtype, converted_.data(), part);
    resolve_bits(piece_, want_.dtype, converted_.data(), part);
    const std::byte* from = converted_.data();
    for_each_strided_run(
        sizes_, strides_, begin, part, [&](std::int64_t position, std::int64_t run) {
          const std::size_t bytes = static_cast<std::size_t>(run) * element_;
          visit(first_ + static_cast<std::size_t>(position) * element_, from, bytes);
          from += bytes;
        });
  }

  const FillJob& job_;
  const Filling& filling_;
  const Tensor& want_;
  const Tensor& have_;
  const Piece& piece_;
  Shape sizes_;
  Shape strides_;
  std::size_t element_;
  std::byte* first_;
  std::vector<std::byte> raw_;
  std::vector<std::byte> converted_;
};

// The dense pieces, by their begin, each of which has memory of its own.
class ApartPieces {
 public:
  explicit ApartPieces(const std::vector<Filling>& fillings) : fillings_(fillings) {}

  void add(const Extent& extent) {
    if (furthest_ != nullptr && extent.begin < furthest_->end) {
      throw Error(ErrorCode::invalid_argument, "the memory of '" + key_of(*furthest_) +
                                                   "' and of '" + key_of(extent) + "' overlaps")
          .at_key(key_of(extent));
    }
    if (furthest_ == nullptr || furthest_->end < extent.end) furthest_ = &extent;
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
  std::map<const std::byte*, std::vector<const Extent*>> firsts;  // by begin: those that differ
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
