// Whether ranks that should hold the same do. Only one of them writes it, so values that drifted
// apart (a parameter that nobody averages, a buffer of each rank's own) would be lost in silence.
//
// Ranks first add up one number over all that they hold together, which is zero if nothing differs.
// Only if it is not, they tell their digests, and rank 0 finds out who holds what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stop_token>
#include <string>
#include <vector>

#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/save/planned_leaf.h"
#include "comm/message.h"
#include "tessera/comm.h"
#include "tessera/leaf.h"

namespace tessera {

// Which of `count` elements of `element_size` bytes a sample is made of, ascending: all of them up
// to 64 KiB, above that 64 windows of 1 KiB from the first to the last. What differs between the
// windows only is not seen.
[[nodiscard]] std::vector<FlatRange> sampled(std::int64_t count, std::size_t element_size);
// A digest of these elements, which are asked for in this order.
[[nodiscard]] std::uint64_t sample_of(const ElementSource& elements, std::int64_t count,
                                      std::size_t element_size);

// What one rank holds of a thing that several hold.
struct HeldCopy {
  std::string name;
  std::uint64_t key = 0;  // of the chunk (proposals.h)
  std::uint64_t digest = 0;
  int holders = 1;          // ranks that hold it
  bool is_written = false;  // by this rank: the others are compared with it
  std::size_t leaf = 0;     // index of this rank's leaves; stays here
};

// This rank's part of a sum over all ranks, modulo 2^64, that is zero if all copies are equal.
[[nodiscard]] std::uint64_t copies_term(const std::vector<HeldCopy>& copies);

// Ranks that hold the same.
struct Alike {
  std::uint64_t count = 0;
  std::vector<int> ranks;  // the lowest sixteen
};
auto fields(FieldsOf<Alike> auto& alike) {
  return std::tie(alike.count, alike.ranks);
}
// What several ranks say of one chunk or value.
struct KnownCopy {
  std::string name;
  int writer = -1;
  std::uint64_t written = 0;
  std::map<std::uint64_t, Alike> digests = {};
};
auto fields(FieldsOf<KnownCopy> auto& copy) {
  return std::tie(copy.name, copy.writer, copy.written, copy.digests);
}
using KnownCopies = std::map<std::uint64_t, KnownCopy>;  // by key
[[nodiscard]] KnownCopies known_copies(const std::vector<HeldCopy>& copies, int rank);
void join_copies(KnownCopies& all, const KnownCopies& more);  // `more`: of higher ranks

// Things of which ranks hold something else than what is written.
struct UnlikeCopies {
  std::vector<std::string> keys;  // ascending; the first 100
  std::size_t more = 0;           // keys
  int writer = 0;                 // rank whose bytes of the first key are written
  std::vector<int> unlike;  // ranks that hold others of the first key, ascending; the first 16
  std::size_t more_ranks = 0;
};
// `keys` is empty if there are none.
[[nodiscard]] UnlikeCopies unlike_copies(const KnownCopies& copies);

// The digests of what is written of these things, by key.
[[nodiscard]] std::map<std::uint64_t, std::uint64_t> written_of_unlike(const KnownCopies& copies);

// What to tell the user.
[[nodiscard]] std::string to_string(const UnlikeCopies& copies);

// The tensors that a rank holds whole, for a save that keeps what other ranks hold of them.

// A rank's leaves, and the chunks that it holds of each.
struct HeldLeaves {
  const std::vector<Leaf>& leaves;
  const std::vector<std::vector<HeldChunk>>& chunks;
};

// Those that it holds in one piece, with digests of all their bytes. Tensors of another dtype or
// shape have other keys: they are no copies of one another. The lowest rank's copy counts as
// written. `threads` read; throws `cancelled` when `stop` is requested.
[[nodiscard]] std::vector<HeldCopy> whole_tensors(const HeldLeaves& held, int threads,
                                                  const std::stop_token& stop);

// A message of 8 bytes that is the same on ranks which hold the same; those of ranks that do not
// combine to an empty one.
[[nodiscard]] Bytes digest_message(const std::vector<HeldCopy>& copies);
[[nodiscard]] Bytes combine_same(const Bytes& left, const Bytes& right);

// The elements of a chunk in this rank's memory.

// Elements that lie densely are copied from a device without others, and ahead. `reader` is of the
// tensor; it and `chunk` outlive the source.
[[nodiscard]] ElementSource elements_of(const Tensor& tensor, const HeldChunk& chunk,
                                        TensorReader& reader);

// A sample of them (sample_of). All its windows are on their way at once if it is on a device.
[[nodiscard]] std::uint64_t sample_of_chunk(const Tensor& tensor, const std::string& name,
                                            const HeldChunk& chunk);

// A digest of all of them. Throws `cancelled` when `stop` is requested.
[[nodiscard]] std::uint64_t digest_of_chunk(const Tensor& tensor, const std::string& name,
                                            const HeldChunk& chunk, const std::stop_token& stop);

}  // namespace tessera
