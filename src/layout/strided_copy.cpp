#include "layout/strided_copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tessera/error.h"

namespace tessera {
namespace {

// Elements of any alignment.
template <std::size_t Bytes>
struct Word {
  std::byte bytes[Bytes];
};

template <typename Element>
void copy_line(const Element* from, std::int64_t from_step, Element* to, std::int64_t to_step,
               std::int64_t count) {
  if (to_step == 1 && from_step == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Element));
  } else if (to_step == 1 && from_step == 0) {
    std::fill_n(to, count, *from);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
  }
}

// Goes through a block in the cache: of the source whole lines are read, of the target whole lines
// are written, whatever the two strides do to the cache's sets. `along` is dense in what is
// written, `across` in what is read.
template <typename Element>
void copy_plane(const Element* from, Element* to, const StridedDim& along,
                const StridedDim& across) {
  constexpr std::int64_t kBlock = sizeof(Element) <= 4 ? 64 : 32;
  constexpr std::int64_t kRow = kBlock + 64 / static_cast<std::int64_t>(sizeof(Element));
  Element block[kBlock * kRow];
  for (std::int64_t j = 0; j < across.size; j += kBlock) {
    const std::int64_t rows = std::min(kBlock, across.size - j);
    for (std::int64_t i = 0; i < along.size; i += kBlock) {
      const std::int64_t columns = std::min(kBlock, along.size - i);
      const Element* const corner = from + i * along.from + j * across.from;
      for (std::int64_t x = 0; x < columns; ++x) {
        const Element* const line = corner + x * along.from;
        for (std::int64_t y = 0; y < rows; ++y) block[y * kRow + x] = line[y * across.from];
      }
      Element* const target = to + i * along.to + j * across.to;
      for (std::int64_t y = 0; y < rows; ++y)
        copy_line(block + y * kRow, 1, target + y * across.to, along.to, columns);
    }
  }
}

// The dimension whose stride is the smallest; of reading only strides that lead on.
std::size_t smallest(const std::vector<StridedDim>& dims, std::int64_t StridedDim::*stride) {
  std::size_t found = 0;
  const auto of = [&](std::size_t d) { return std::abs(dims[d].*stride); };
  for (std::size_t d = 1; d < dims.size(); ++d) {
    if (of(d) != 0 && (of(found) == 0 || of(d) < of(found))) found = d;
  }
  return found;
}

std::vector<StridedDim> all_but(const std::vector<StridedDim>& dims, std::size_t one,
                                std::size_t other) {
  std::vector<StridedDim> rest;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    if (d != one && d != other) rest.push_back(dims[d]);
  }
  return rest;
}

template <typename Element>
void copy_elements(const StridedMove& move, const Element* from, Element* to) {
  if (move.dims.empty()) {
    to[move.to] = from[move.from];
    return;
  }
  const std::size_t along = smallest(move.dims, &StridedDim::to);
  const std::size_t across = smallest(move.dims, &StridedDim::from);
  std::vector<StridedDim> outer = all_but(move.dims, along, across);
  const StridedDim& line = move.dims[along];
  const bool plane = along != across && move.dims[across].from != 0 && line.from != 0;
  if (!plane && along != across) outer.push_back(move.dims[across]);
  StridedWalk walk(outer, move.from, move.to);
  do {
    if (plane) {
      copy_plane(from + walk.from, to + walk.to, line, move.dims[across]);
    } else {
      copy_line(from + walk.from, line.from, to + walk.to, line.to, line.size);
    }
  } while (walk.next());
}

// Makes every dimension lead on in the source.
void turn_forward(StridedMove& move) {
  for (StridedDim& dim : move.dims) {
    if (dim.from >= 0) continue;
    move.from += (dim.size - 1) * dim.from;
    move.to += (dim.size - 1) * dim.to;
    dim.from = -dim.from;
    dim.to = -dim.to;
  }
}

// Whether the two dimensions are one, on both sides.
bool continues(const StridedDim& outer, const StridedDim& inner) {
  return outer.from == inner.from * inner.size && outer.to == inner.to * inner.size;
}

std::vector<StridedDim> joined(const std::vector<StridedDim>& dims) {
  std::vector<StridedDim> result;
  for (const StridedDim& dim : dims) {
    if (!result.empty() && continues(result.back(), dim)) {
      result.back() = {result.back().size * dim.size, dim.from, dim.to};
    } else {
      result.push_back(dim);
    }
  }
  return result;
}

}  // namespace

bool StridedWalk::next() {
  for (std::size_t d = dims_.size(); d-- > 0;) {
    const StridedDim& dim = dims_[d];
    if (++index_[d] < dim.size) {
      from += dim.from;
      to += dim.to;
      return true;
    }
    from -= (dim.size - 1) * dim.from;
    to -= (dim.size - 1) * dim.to;
    index_[d] = 0;
  }
  return false;
}

StridedMove normalized(StridedMove move) {
  std::erase_if(move.dims, [](const StridedDim& dim) { return dim.size == 1; });
  turn_forward(move);
  std::stable_sort(move.dims.begin(), move.dims.end(),
                   [](const StridedDim& a, const StridedDim& b) { return a.from > b.from; });
  move.dims = joined(move.dims);
  return move;
}

void copy_strided(const StridedMove& move, const std::byte* from, std::byte* to,
                  std::size_t element) {
  const auto copy = [&]<std::size_t Bytes>() {
    copy_elements(move, reinterpret_cast<const Word<Bytes>*>(from),
                  reinterpret_cast<Word<Bytes>*>(to));
  };
  switch (element) {
    case 1:
      return copy.template operator()<1>();
    case 2:
      return copy.template operator()<2>();
    case 4:
      return copy.template operator()<4>();
    case 8:
      return copy.template operator()<8>();
    case 16:
      return copy.template operator()<16>();
    default:
      throw Error(ErrorCode::invalid_argument, "elements of " + std::to_string(element) + " bytes");
  }
}

}  // namespace tessera
