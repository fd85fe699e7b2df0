#include "checkpoint/read/gather.h"

#include <algorithm>
#include <utility>

#include "base/numbers.h"
#include "checkpoint/read/reader_source.h"

namespace tessera {
namespace {

// A range takes at least so much of the scratch memory: it bounds how many there are at a time.
constexpr std::int64_t kLeastRange = 256;
// Ranges whose places in the scratch memory are a multiple of this apart would share few sets of
// the cache.
constexpr std::int64_t kSetStride = 512;
constexpr std::int64_t kLine = 64;

// How many dimensions lead on in the storage; those behind them repeat elements.
std::size_t leading_dims(std::span<const StridedDim> dims) {
  std::size_t count = dims.size();
  while (count > 0 && dims[count - 1].from == 0) --count;
  return count;
}

// `copy` with what is read and what is written exchanged.
StridedMove reversed(StridedMove copy) {
  std::swap(copy.from, copy.to);
  for (StridedDim& dim : copy.dims) std::swap(dim.from, dim.to);
  return copy;
}

// Goes over a storage in batches of ranges; the derived class says what is done with each.
class Batches {
 public:
  // `gap`: bytes between two ranges that are taken along.
  Batches(const StridedMove& move, std::size_t element, std::uint64_t origin, std::int64_t gap,
          GatherScratch& scratch)
      : scratch_(scratch),
        element_(static_cast<std::int64_t>(element)),
        move_(normalized(move)),
        origin_(origin),
        gap_(gap / element_),
        leading_(leading_dims(move_.dims)) {
    measure();
  }
  virtual ~Batches() = default;
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  void run() {
    if (chunked_ == 0) return take_batch(move_.from, move_.to, 1, 1);
    // One dimension in steps, those before it one index at a time.
    const std::size_t outer = chunked_ - 1;
    const StridedDim& chunk = move_.dims[outer];
    StridedWalk walk(std::span(move_.dims).first(outer), move_.from, move_.to);
    do {
      for (std::int64_t i = 0; i < chunk.size; i += step_) {
        const std::int64_t left = chunk.size - i;
        take_batch(walk.from + i * chunk.from, walk.to + i * chunk.to, std::min(step_, left), left);
      }
    } while (walk.next());
  }

 protected:
  // The ranges of the batch are in scratch_.ranges, and `copy` takes their elements from
  // scratch_.bytes to where they belong.
  virtual void carry_out(const StridedMove& copy) = 0;

  GatherScratch& scratch_;
  const std::int64_t element_;

 private:
  // Elements from the first to the last of dimensions `d` and on.
  [[nodiscard]] std::int64_t extent(std::size_t d) const {
    std::int64_t elements = 1;
    for (; d < leading_; ++d)
      elements = checked_add(elements, checked_mul(move_.dims[d].size - 1, move_.dims[d].from));
    return elements;
  }

  // Finds which dimensions lie in one range, and which of these ranges are read at a time.
  void measure() {
    within_ = dims_before_a_range();
    range_ = extent(within_);
    place_ = std::max(range_, kLeastRange / element_);
    if (place_ * element_ % kSetStride == 0) place_ += kLine / element_;
    const std::int64_t span = kSpanBytes / element_;
    const std::int64_t size = find_chunked(span);
    if (chunked_ > 0) step_ = step_within(span, size);
  }

  [[nodiscard]] std::size_t dims_before_a_range() const {
    std::size_t count = leading_;
    while (count > 0) {
      const std::int64_t gap = move_.dims[count - 1].from - extent(count);
      if (gap > gap_) break;
      --count;
    }
    return count;
  }

  // Makes as many dimensions be read whole as `span` elements of scratch memory allow; returns how
  // many elements they take.
  std::int64_t find_chunked(std::int64_t span) {
    chunked_ = leading_;
    std::int64_t size = 1;
    while (chunked_ > 0) {
      const std::size_t d = chunked_ - 1;
      // Whoever gets to the dimensions before `within_` has found that a range is no longer.
      if (d + 1 == within_) size = place_;
      const std::int64_t larger = d >= within_ ? extent(d) : checked_mul(size, move_.dims[d].size);
      if (larger > span) break;
      size = larger;
      --chunked_;
    }
    return size;
  }

  // How many indices of the chunked dimension `span` elements have room for, of `size` each.
  [[nodiscard]] std::int64_t step_within(std::int64_t span, std::int64_t size) const {
    if (chunked_ <= within_) return std::max<std::int64_t>(span / size, 1);
    return (span - extent(chunked_)) / move_.dims[chunked_ - 1].from + 1;
  }

  // Takes `count` indices of the chunked dimension from position `from` on; `left`: how many there
  // are to its end, these included.
  void take_batch(std::int64_t from, std::int64_t to, std::int64_t count, std::int64_t left) {
    scratch_.ranges.clear();
    copy_.dims.clear();
    if (chunked_ > within_ || within_ == 0) {
      take_one(from, count, left);
    } else {
      take_several(from, count);
    }
    add_dims(std::max(within_, chunked_), move_.dims.size());
    carry_out({0, to, copy_.dims});
  }

  // Lets the copy go along dimensions [begin, end) of the move.
  void add_dims(std::size_t begin, std::size_t end) {
    const auto dims = std::span(move_.dims).subspan(begin, end - begin);
    copy_.dims.insert(copy_.dims.end(), dims.begin(), dims.end());
  }

  // A part of one range. What lies between it and the next part is taken along, so that the parts
  // together are the whole range.
  void take_one(std::int64_t from, std::int64_t count, std::int64_t left) {
    std::int64_t size = extent(chunked_);
    if (chunked_ > 0) {
      const StridedDim& chunk = move_.dims[chunked_ - 1];
      const std::int64_t to_last = (count - 1) * chunk.from;
      size = count < left ? std::max(size + to_last, to_last + chunk.from) : size + to_last;
      copy_.dims.push_back({count, chunk.from, chunk.to});
    }
    grow(size);
    add_range(from, 0, size);
  }

  // Whole ranges, each at its place in the scratch memory.
  void take_several(std::int64_t from, std::int64_t count) {
    const std::size_t first = chunked_ == 0 ? 0 : chunked_ - 1;
    add_dims(first, within_);
    if (chunked_ > 0) copy_.dims[0].size = count;
    lay_out_ranges();
    // The place of each range in the file, and in the target.
    std::vector<StridedDim> ranges = copy_.dims;
    for (std::size_t d = 0; d < ranges.size(); ++d)
      ranges[d] = {copy_.dims[d].size, move_.dims[first + d].from, copy_.dims[d].from};
    StridedWalk walk(ranges, from, 0);
    do {
      add_range(walk.from, walk.to, range_);
    } while (walk.next());
  }

  // Gives each range of the batch its place, one behind the other.
  void lay_out_ranges() {
    std::int64_t places = 1;
    for (std::size_t d = copy_.dims.size(); d-- > 0;) {
      copy_.dims[d].from = places * place_;
      places *= copy_.dims[d].size;
    }
    grow(places * place_);
  }

  void grow(std::int64_t elements) {
    const auto bytes = static_cast<std::size_t>(elements * element_);
    if (scratch_.bytes.size() < bytes) scratch_.bytes.resize(bytes);
  }

  void add_range(std::int64_t position, std::int64_t place, std::int64_t size) {
    scratch_.ranges.push_back({origin_ + static_cast<std::uint64_t>(position * element_),
                               MutableByteView(scratch_.bytes)
                                   .subspan(static_cast<std::size_t>(place * element_),
                                            static_cast<std::size_t>(size * element_))});
  }

  const StridedMove move_;
  const std::uint64_t origin_;
  const std::int64_t gap_;     // elements
  const std::size_t leading_;  // dimensions that lead on in the storage; the rest repeat elements
  std::size_t within_ = 0;     // dimensions from here on lie in one range
  std::size_t chunked_ = 0;    // dimensions from here on are read whole, the one before in steps
  std::int64_t step_ = 1;      // indices of that one
  std::int64_t range_ = 1;     // elements of one range
  std::int64_t place_ = 1;     // elements of scratch memory for it
  StridedMove copy_;           // of the batch
};

class Gather final : public Batches {
 public:
  Gather(const StridedMove& move, std::size_t element, std::uint64_t origin,
         const RangeReader& read, std::byte* out, GatherScratch& scratch)
      : Batches(move, element, origin, kFreeGapBytes, scratch), read_(read), out_(out) {}

 private:
  void carry_out(const StridedMove& copy) override {
    read_(scratch_.ranges);
    copy_strided(normalized(copy), scratch_.bytes.data(), out_, static_cast<std::size_t>(element_));
  }

  const RangeReader& read_;
  std::byte* const out_;
};

class Scatter final : public Batches {
 public:
  Scatter(const StridedMove& move, std::size_t element, std::uint64_t origin, const std::byte* in,
          const RangeWriter& write, GatherScratch& scratch)
      : Batches(move, element, origin, 0, scratch), in_(in), write_(write) {}

 private:
  void carry_out(const StridedMove& copy) override {
    copy_strided(normalized(reversed(copy)), in_, scratch_.bytes.data(),
                 static_cast<std::size_t>(element_));
    write_(scratch_.ranges);
  }

  const std::byte* const in_;
  const RangeWriter& write_;
};

}  // namespace

StridedMove move_of(const Box& box, const Shape& from, const Shape& to, std::int64_t first) {
  StridedMove move{0, first, {}};
  for (std::size_t d = 0; d < box.sizes.size(); ++d) {
    move.from += box.offsets[d] * from[d];
    move.to += box.offsets[d] * to[d];
    move.dims.push_back({box.sizes[d], from[d], to[d]});
  }
  return move;
}

void gather(const StridedMove& move, std::size_t element, std::uint64_t origin,
            const RangeReader& read, std::byte* out, GatherScratch& scratch) {
  Gather(move, element, origin, read, out, scratch).run();
}

void scatter(const StridedMove& move, std::size_t element, std::uint64_t origin,
             const std::byte* in, const RangeWriter& write, GatherScratch& scratch) {
  Scatter(move, element, origin, in, write, scratch).run();
}

}  // namespace tessera
