#include "checkpoint/load/fill.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/copies.h"
#include "base/parallel.h"
#include "base/recent_blocks.h"
#include "checkpoint/load/jobs.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/meter.h"
#include "io/checked_source.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "tessera/restore.h"
#include "value/children.h"
#include "value/inner_tensors.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

// The place of a byte: addresses of two devices say nothing about each other.
struct ByteAddress {
  std::string_view device;  // empty: the host
  std::uintptr_t address = 0;
  bool operator==(const ByteAddress&) const = default;
  bool operator<(const ByteAddress& other) const {
    return std::tie(device, address) < std::tie(other.device, other.address);
  }
};

// A piece and the bytes between its first element and its last.
struct Extent {
  PieceOf of;
  const Tensor* tensor = nullptr;
  const Piece* piece = nullptr;
  ByteAddress begin;
  ByteAddress end;
  BytePattern bytes;  // those of them that are the piece's

  [[nodiscard]] bool same_array(const Extent& other) const {
    return begin == other.begin && tensor->dtype == other.tensor->dtype &&
           tensor->shape == other.tensor->shape && piece->slice == other.piece->slice &&
           strides_of(*piece) == strides_of(*other.piece);
  }
};

ByteAddress place_of(const Storage& storage) {
  if (storage.device) return {storage.device->device(), storage.device->address()};
  return {{}, reinterpret_cast<std::uintptr_t>(storage.data)};
}

Extent extent_of(PieceOf of, const Tensor& tensor, const Piece& piece) {
  const std::size_t element = size_of(tensor.dtype);
  const Shape sizes = array_of(piece.slice);
  const std::int64_t reach = strided_reach(sizes, strides_of(piece));
  ByteAddress begin = place_of(*piece.storage);
  begin.address += static_cast<std::size_t>(piece.storage_offset) * element;
  ByteAddress end = begin;
  end.address += static_cast<std::size_t>(reach) * element;
  return {of,    &tensor, &piece,
          begin, end,     bytes_of_array(begin.address, element, sizes, strides_of(piece))};
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

// Pieces by their begin, each of which has memory of its own.
class ApartPieces {
 public:
  explicit ApartPieces(const std::vector<Filling>& fillings) : fillings_(fillings) {}

  void add(const Extent& extent) {
    std::erase_if(around_, [&extent](const Extent* other) {
      return other->end.device != extent.begin.device || !(extent.begin < other->end);
    });
    for (const Extent* other : around_) {
      if (share_memory(other->bytes, extent.bytes)) refuse(*other, extent);
    }
    around_.push_back(&extent);
  }

 private:
  [[noreturn]] void refuse(const Extent& one, const Extent& other) const {
    throw Error(ErrorCode::invalid_argument,
                "the memory of '" + key_of(one) + "' and of '" + key_of(other) + "' overlaps")
        .at_key(key_of(other));
  }
  [[nodiscard]] const std::string& key_of(const Extent& extent) const {
    return fillings_[extent.of.filling].key;
  }

  const std::vector<Filling>& fillings_;
  std::vector<const Extent*> around_;  // those that end behind the begin of the last one
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
  std::map<ByteAddress, std::vector<const Extent*>> firsts;  // by begin: extents that differ
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
    apart.add(extent);
  }
  return owners;
}

namespace {

// What one pass over the fillings has to do, in its order.
struct Work {
  std::vector<ChunkJob> chunks;
  std::vector<PieceOf> pieces;  // of tensors without compressed chunks

  void add(const std::vector<Filling>& fillings, std::size_t filling,
           const std::vector<std::size_t>& wanted) {
    if (wanted.empty()) return;
    std::vector<ChunkJob> jobs = chunk_jobs(fillings, filling, wanted);
    if (jobs.empty()) {
      for (const std::size_t piece : wanted) pieces.push_back({filling, piece});
    }
    std::ranges::move(jobs, std::back_inserter(chunks));
  }
};

// The place in a file of the first element that is wanted; no name: it is in memory.
using FilePlace = std::pair<std::string_view, std::uint64_t>;  // name, offset

FilePlace file_place_of(const Piece& held, std::int64_t local, std::size_t element) {
  if (!held.storage || !held.storage->source) return {};
  const auto elements = static_cast<std::uint64_t>(held.storage_offset + local);
  return {held.storage->source->name(), held.storage->offset + elements * element};
}

FilePlace file_place_of(const Tensor& have, const Slice& wanted) {
  const std::size_t element = size_of(have.stored.value_or(have.dtype));
  const std::int64_t first = RunSequence(wanted, have.shape)[0].global;
  for (const Piece& held : have.pieces) {
    if (numel(held.slice) == 0) continue;
    const RunSequence runs(held.slice, have.shape);
    const std::int64_t index = runs.first_ending_after(first);
    if (index == runs.size() || runs[index].global > first) continue;
    return file_place_of(held, runs[index].local + first - runs[index].global, element);
  }
  return {};
}

// Gives `work` the order in which files have it: then blocks of digests that two of it share are
// wanted at about the same time.
template <typename One, typename PlaceOfOne>
void sort_by_place(std::vector<One>& work, const PlaceOfOne& place_of_one) {
  std::vector<std::pair<FilePlace, One>> placed;
  placed.reserve(work.size());
  for (One& one : work) {
    const FilePlace place = place_of_one(one);
    placed.emplace_back(place, std::move(one));
  }
  std::ranges::stable_sort(placed, {}, [](const auto& one) { return one.first; });
  std::ranges::transform(placed, work.begin(), [](auto& one) { return std::move(one.second); });
}

void sort_by_place(const std::vector<Filling>& fillings, Work& work) {
  sort_by_place(work.pieces, [&](const PieceOf& of) {
    const Filling& filling = fillings[of.filling];
    return file_place_of(filling.found.as_tensor(),
                         filling.wanted.as_tensor().pieces[of.piece].slice);
  });
  sort_by_place(work.chunks, [&](const ChunkJob& chunk) {
    return file_place_of(fillings[chunk.filling].found.as_tensor().pieces[chunk.chunk], 0, 1);
  });
}

// Far away threads wait for answers most of the time.
int threads_for(const FillJob& job) {
  constexpr int kFarAway = 8;
  if (job.fillings.empty()) return job.threads;
  const bool is_far = request_cost_of(job.fillings[0].found.as_tensor()) > kNearRequest;
  return is_far ? std::max(job.threads, kFarAway) : job.threads;
}

// How many blocks of digests a job keeps, at most. Each thread is at both ends of a piece; and one
// that has to wait for a processor finds the block that it shares with the piece behind it, which
// another thread has read meanwhile, and a few more.
std::size_t blocks_for(const FillJob& job, int threads) {
  const std::uint64_t most = 2 * static_cast<std::uint64_t>(threads) + 12;
  return static_cast<std::size_t>(std::clamp<std::uint64_t>(job.shared / kDigestBlock, 2, most));
}

void carry_out(const FillJob& job, Work& work) {
  sort_by_place(job.fillings, work);
  const int threads = threads_for(job);
  const SharedBlocks sharing(blocks_for(job, threads));
  parallel_for(threads, work.pieces.size() + work.chunks.size(), [&](std::size_t i) {
    if (i >= work.pieces.size()) return carry_out(job, work.chunks[i - work.pieces.size()]);
    const PieceOf& of = work.pieces[i];
    carry_out(job, of, job.fillings[of.filling], of.piece);
  });
}

}  // namespace

void fill_all(const FillJob& job) {
  Work own;
  Work others;
  for (std::size_t i = 0; i < job.fillings.size(); ++i) {
    const auto& pieces = job.fillings[i].wanted.as_tensor().pieces;
    std::vector<std::size_t> filled;
    std::vector<std::size_t> compared;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      if (numel(pieces[p].slice) == 0) continue;
      (job.owners[i][p] == PieceOf{i, p} ? filled : compared).push_back(p);
    }
    own.add(job.fillings, i, filled);
    others.add(job.fillings, i, compared);
  }
  carry_out(job, own);
  carry_out(job, others);
}

namespace {

constexpr std::size_t kWindow = 64 << 10;     // bytes, a multiple of every element's
constexpr std::size_t kMostWrites = 1 << 10;  // for a device at once

enum class Filler : std::uint8_t { ones, top_bit, one };

// All bits set are a NaN in every type that has one, except in those whose only NaN is what would
// be a negative zero.
Filler filler_of(DType dtype) {
  switch (dtype) {
    case DType::int64:
    case DType::int32:
    case DType::int16:
    case DType::int8:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      return Filler::top_bit;
    case DType::bool8:
      return Filler::one;
    default:
      return Filler::ones;
  }
}

using Window = std::array<std::byte, kWindow>;

// Elements without a value.
void blank(DType dtype, Window& window) {
  const Filler filler = filler_of(dtype);
  window.fill(filler == Filler::ones ? std::byte{0xFF} : std::byte{0});
  if (filler == Filler::ones) return;
  const std::size_t element = size_of(dtype);
  for (std::size_t last = element - 1; last < window.size(); last += element)
    window[last] = filler == Filler::one ? std::byte{1} : std::byte{0x80};
}

// Calls `write(byte, size)` for windows of the piece's bytes, by their place in its storage.
template <typename Write>
void each_part(const Tensor& tensor, const Piece& piece, const Write& write) {
  const std::size_t element = size_of(tensor.dtype);
  const auto visit = [&](std::int64_t position, std::int64_t count) {
    auto at = static_cast<std::size_t>(piece.storage_offset + position) * element;
    const std::size_t end = at + static_cast<std::size_t>(count) * element;
    for (; at < end; at += kWindow) write(at, std::min(kWindow, end - at));
  };
  const Shape sizes = array_of(piece.slice);
  for_each_strided_run(sizes, strides_of(piece), 0, numel(sizes), visit);
}

void spoil_device(const Tensor& tensor, const Piece& piece, const Window& window) {
  DeviceWriter writer(piece.storage->device);
  std::vector<WriteRange> writes;
  const auto write = [&] {
    writer.write_ranges(writes);
    writes.clear();
  };
  each_part(tensor, piece, [&](std::size_t at, std::size_t size) {
    writes.push_back({at, {window.data(), size}});
    if (writes.size() == kMostWrites) write();
  });
  write();
  writer.finish();
}

void spoil(const Tensor& tensor, Window& window) {
  blank(tensor.dtype, window);
  for (const Piece& piece : tensor.pieces) {
    if (!piece.storage || numel(piece.slice) == 0) continue;
    if (piece.storage->device) {
      spoil_device(tensor, piece, window);
      continue;
    }
    each_part(tensor, piece, [&](std::size_t at, std::size_t size) {
      std::memcpy(piece.storage->data + at, window.data(), size);
    });
  }
}

// Goes on behind a tensor that cannot be overwritten, and then says so.
class Spoiler {
 public:
  void add(const Value& tensor) {
    try {
      spoil(tensor.as_tensor(), window_);
    } catch (const std::exception& error) {
      if (failed_.empty()) failed_ = error.what();
    }
  }

  [[nodiscard]] Error told(const Error& failure) const {
    const std::string spoiled =
        "after which all that it was to fill is NaN or, of integers, an extreme";
    // A load that failed inside of a larger one has said so.
    const bool is_said = std::string_view(failure.what()).find(spoiled) != std::string_view::npos;
    if (failed_.empty() && is_said) return failure;
    Error all = failure;
    all.while_doing(failed_.empty() ? spoiled
                                    : "after which what it was to fill is undefined, and cannot "
                                      "be overwritten: " +
                                          failed_);
    return all;
  }

 private:
  Window window_ = {};
  std::string failed_;
};

}  // namespace

Error spoiled(const std::vector<Filling>& fillings, const Error& failure) {
  Spoiler spoiler;
  for (const Filling& filling : fillings) spoiler.add(filling.wanted);
  return spoiler.told(failure);
}

Error spoiled(const Value& tree, const Error& failure) {
  await_copies();
  Spoiler spoiler;
  for (const Leaf& leaf : leaves_of(tree)) {
    if (leaf.value.is(Value::Kind::tensor)) spoiler.add(leaf.value);
  }
  return spoiler.told(failure);
}

namespace {

bool is_known(const Tensor& tensor) {
  const bool here = std::all_of(tensor.pieces.begin(), tensor.pieces.end(),
                                [](const Piece& piece) { return piece.storage != nullptr; });
  return here && (!tensor.pieces.empty() || numel(tensor.shape) == 0);
}

}  // namespace

std::shared_ptr<Storage> fresh_storage(DType dtype, std::uint64_t bytes) {
  auto storage = std::make_shared<Storage>();
  storage->owner = std::shared_ptr<void>(
      std::malloc(static_cast<std::size_t>(std::max<std::uint64_t>(bytes, 1))), std::free);
  if (!storage->owner)
    throw Error(ErrorCode::limit, "no memory for " + std::to_string(bytes) + " bytes");
  storage->data = static_cast<std::byte*>(storage->owner.get());
  storage->size = bytes;
  storage->dtype = dtype;
  return storage;
}

FreshMemory::FreshMemory(const std::vector<Leaf>& leaves, bool map)
    : files_(map ? std::make_unique<MappedFiles>() : nullptr) {
  for (NamedTensor& named : all_tensors(leaves))
    names_.emplace(named.tensor.identity(), std::move(named.name));
}

Value FreshMemory::of(const Value& tree) {
  return copy_tree(tree, [this](const Value& node) -> std::optional<Value> {
    if (!node.is(Value::Kind::tensor) || !is_known(node.as_tensor())) return std::nullopt;
    return tensor(node);
  });
}

Value FreshMemory::tensor(const Value& node) {
  Tensor made = node.as_tensor();
  const std::string& name = names_[node.identity()];
  std::optional<Tensor> view;
  try {
    require_bounded(made, name);
    if (files_) view = files_->view(made, name);
    made.pieces =
        view ? std::move(view->pieces)
             : std::vector{Piece{whole(made.shape),
                                 fresh_storage(made.dtype, byte_size(made.dtype, made.shape)),
                                 0,
                                 {},
                                 -1}};
  } catch (Error& error) {
    throw error.at_key(name);
  }
  if (made.attributes) made.attributes = std::make_shared<const Value>(of(*made.attributes));
  if (view) return Value(std::move(made));
  fillings_.push_back({name, Value(std::move(made)), node});
  return fillings_.back().wanted;
}

}  // namespace tessera
