// Fills tensors in memory with what a checkpoint has for them: the second half of a load.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "tessera/error.h"
#include "tessera/load_options.h"
#include "tessera/mapped.h"
#include "tessera/value.h"

namespace tessera {

// A tensor whose pieces are to be filled, and the same tensor in the checkpoint. Both are tensor
// leaves of one shape, with dtypes that can be cast (cast.h), and `wanted` may be written
// (memory.h).
struct Filling {
  std::string key;
  Value wanted;
  Value found;
};

// Bytes of the pieces that are to be filled.
[[nodiscard]] std::uint64_t bytes_of(const std::vector<Filling>& fillings);

// Keys that share memory. Throws `invalid_argument` naming both keys when pieces share a part of
// their memory. Pieces that are one tensor under two keys (tied weights) are told from that: index
// i of the result says for each piece of filling i whose memory it is.
struct PieceOf {
  std::size_t filling = 0;
  std::size_t piece = 0;
  bool operator==(const PieceOf&) const = default;
};
using Owners = std::vector<std::vector<PieceOf>>;
[[nodiscard]] Owners owners_of(const std::vector<Filling>& fillings);

// What a load throws where the checkpoint has other elements for `key` than for `owner`, whose
// memory that is.
[[nodiscard]] Error other_values(const std::string& key, const std::string& owner);

// Fills every piece. A piece that is another key's memory is compared with it instead: `mismatch`
// naming both keys when the checkpoint has other elements for it. What the reads could not check by
// themselves (views) goes to `checks`, if there are any.
struct FillJob {
  const std::vector<Filling>& fillings;
  const Owners& owners;
  int threads = 1;
  StorageChecks* checks = nullptr;
  IoCounters& counters;
  Meter& meter;
  std::size_t window = 1 << 20;  // bytes of elements that are read, converted or scattered at once
  std::size_t tile = TensorReader::kTileBytes;  // bytes of elements put into order
  FilledHook filled = {};
  std::uint64_t shared = 64 << 20;  // bytes of blocks of digests that pieces share
};
void fill_all(const FillJob& job);

// What becomes of the memory of a load that failed while it was filling it.

// As spoiled() of tessera/restore.h: overwrites what the fillings were to fill.
[[nodiscard]] Error spoiled(const std::vector<Filling>& fillings, const Error& failure);

// Trees whose tensors are in memory of their own.

// Memory of `bytes` bytes, not filled. Throws `limit` if there is none.
[[nodiscard]] std::shared_ptr<Storage> fresh_storage(DType dtype, std::uint64_t bytes);

// Copies trees of a checkpoint and gives each tensor in them, also those inside tuples, objects and
// attributes, memory that it owns. What has to be read for that is collected.
class FreshMemory {
 public:
  // `leaves` name the tensors of the trees. With `map`, files are mapped where that gives a tensor
  // (mapped.h).
  FreshMemory(const std::vector<Leaf>& leaves, bool map);

  // A tensor of which no part is known (inside of an object) stays as it is. Throws `limit` for one
  // that is not bounded (reader.h) or for which there is no memory.
  [[nodiscard]] Value of(const Value& tree);

  // What is to be read into the memory given so far.
  [[nodiscard]] std::vector<Filling> take() { return std::move(fillings_); }

 private:
  [[nodiscard]] Value tensor(const Value& node);

  std::unordered_map<const void*, std::string> names_;  // by node
  std::vector<Filling> fillings_;
  std::unique_ptr<MappedFiles> files_;  // null: everything is read
};

}  // namespace tessera
