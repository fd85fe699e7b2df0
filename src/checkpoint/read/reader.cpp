#include "checkpoint/read/reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/crc32.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/coalesce.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Runs of one storage that a reader's checksum follows: of more the storage is read again.
constexpr std::size_t kMaxFollowed = 1024;
// Bytes that are read at once when a checksum follows.
constexpr std::size_t kFollowedBytes = 256 << 10;

constexpr std::uint64_t kUnfoldedBytes = std::uint64_t{16} << 30;
constexpr std::uint64_t kUnfoldedTimes = 1000;

Shape piece_shape(const Slice& slice) {
  if (const Box* box = std::get_if<Box>(&slice)) return box->sizes;
  return {numel(slice)};
}

bool is_dense(const Shape& sizes, const Shape& strides) {
  if (strides.empty() || numel(sizes) <= 1) return true;
  const Shape dense = contiguous_strides(sizes);
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != dense[d]) return false;
  }
  return true;
}

}  // namespace

void IoCounters::add(const IoReport& part) {
  const std::lock_guard lock(mutex_);
  total_.bytes_needed += part.bytes_needed;
  total_.bytes_read += part.bytes_read;
  total_.bytes_unchecked += part.bytes_unchecked;
  total_.bytes_written += part.bytes_written;
}

IoReport IoCounters::report() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

// A piece with raw bytes, and how far its checksum has been followed.
struct TensorReader::Source {
  Piece piece;
  Shape sizes;                   // of the piece's own array
  bool dense = true;             // row-major without gaps
  std::uint64_t first_byte = 0;  // of the piece in its storage
  std::vector<ReadRun> runs;     // under running CRCs, in the order of reading
  bool followed = true;          // false: they were too many
  std::uint64_t read = 0;        // bytes read from the source
  bool checked = false;          // the storage passed its CRC, or the job sees to it

  // Whether follow() looks at bytes.
  [[nodiscard]] bool follows() const { return followed && !checked && has_crc(*piece.storage); }

  // Bytes [at, at + bytes.size()) of the storage have just been read.
  void follow(std::uint64_t at, ByteView bytes, const std::string& key) {
    if (!follows()) return;
    const Storage& storage = *piece.storage;
    if (runs.empty() || runs.back().end() != at) {
      if (runs.size() == kMaxFollowed) {
        followed = false;
        runs.clear();
        return;
      }
      runs.push_back({at, 0, 0});
    }
    ReadRun& run = runs.back();
    run.crc = tessera::crc32(bytes, run.crc);
    run.size += bytes.size();
    if (run.size != storage.size) return;
    require_crc(storage, run.crc, key);
    checked = true;
  }
};

void require_bounded(const Tensor& tensor, const std::string& name) {
  const std::size_t element = size_of(tensor.stored.value_or(tensor.dtype));
  for (const Piece& piece : tensor.pieces) {
    const Storage* storage = piece.storage.get();
    // What is compressed may well be a thousand times smaller.
    const bool known = storage != nullptr && storage->data == nullptr &&
                       storage->encoding != Encoding::torch_item_zstd;
    if (!known) continue;
    const auto count = narrow<std::uint64_t>(numel(piece.slice));
    if (count <= kUnfoldedBytes / element || count / kUnfoldedTimes <= storage->size / element) {
      continue;
    }
    throw Error(ErrorCode::limit, std::to_string(count) + " elements of " +
                                      std::to_string(element) + " bytes are made of " +
                                      std::to_string(storage->size) + " stored bytes")
        .at_path(storage->source ? storage->source->name() : "memory")
        .at_key(name);
  }
}

TensorReader::TensorReader(const Tensor& tensor, std::string name)
    : tensor_(tensor),
      name_(std::move(name)),
      stored_(tensor.stored.value_or(tensor.dtype)),
      element_(size_of(stored_)) {
  require_bounded(tensor, name_);
  for (const Piece& piece : tensor.pieces) slices_.push_back(piece.slice);
  sources_.resize(tensor.pieces.size());
}

TensorReader::~TensorReader() = default;

TensorReader::Source& TensorReader::source(std::size_t index) {
  if (!sources_[index]) {
    auto made = std::make_unique<Source>();
    made->piece = decoded_piece(tensor_, tensor_.pieces[index], name_);
    made->sizes = piece_shape(made->piece.slice);
    made->dense = is_dense(made->sizes, made->piece.strides);
    made->first_byte =
        checked_mul<std::uint64_t>(narrow<std::uint64_t>(made->piece.storage_offset), element_);
    sources_[index] = std::move(made);
  }
  return *sources_[index];
}

void TensorReader::prepare_plan(const Slice& target) {
  if (planned_ == target) return;
  const Slice targets[] = {target};
  plan_ = plan_copies(tensor_.shape, slices_, targets);
  require_filled(tensor_.shape, targets, plan_);
  gaps_ = gaps_to_close(plan_, slices_.size(), element_);
  planned_ = target;
}

void TensorReader::read(const Slice& target, std::int64_t begin, std::int64_t count,
                        std::byte* out) {
  if (stored_ == tensor_.dtype) {
    read_stored(target, begin, count, out);
    return;
  }
  const auto step = kSpanBytes / static_cast<std::int64_t>(element_);
  unconverted_.resize(static_cast<std::size_t>(std::min(step, count)) * element_);
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t part = std::min(step, count - done);
    read_stored(target, begin + done, part, unconverted_.data());
    cast(stored_, unconverted_.data(), tensor_.dtype,
         out + static_cast<std::size_t>(done) * size_of(tensor_.dtype), part);
  }
}

void TensorReader::read_stored(const Slice& target, std::int64_t begin, std::int64_t count,
                               std::byte* out) {
  prepare_plan(target);
  const std::int64_t end = begin + count;
  auto copy =
      std::upper_bound(plan_.begin(), plan_.end(), begin,
                       [](std::int64_t at, const Copy& c) { return at < c.to_local + c.count; });
  std::vector<Copy> window;
  for (; copy != plan_.end() && copy->to_local < end; ++copy) {
    Copy part = *copy;
    const std::int64_t skip = std::max<std::int64_t>(0, begin - part.to_local);
    part.from_local += skip;
    part.to_local += skip;
    part.count = std::min(part.count - skip, end - part.to_local);
    window.push_back(part);
  }
  // By piece, and within a piece in its own order: that is the order of its bytes.
  std::stable_sort(window.begin(), window.end(), [](const Copy& a, const Copy& b) {
    return std::pair(a.from, a.from_local) < std::pair(b.from, b.from_local);
  });
  report_.bytes_needed += static_cast<std::uint64_t>(count) * element_;
  const auto span = kSpanBytes / static_cast<std::int64_t>(element_);
  for (std::size_t first = 0; first < window.size();) {
    std::size_t last = first + 1;
    const Copy& head = window[first];
    while (last < window.size() && window[last].from == head.from) {
      const Copy& previous = window[last - 1];
      const bool near =
          window[last].from_local - (previous.from_local + previous.count) <= gaps_[head.from];
      const bool small = window[last].from_local + window[last].count - head.from_local <= span;
      if (!near || !small) break;
      ++last;
    }
    read_group(source(head.from), std::span(window).subspan(first, last - first), begin, out);
    first = last;
  }
}

void TensorReader::read_group(Source& source, std::span<const Copy> group, std::int64_t begin,
                              std::byte* out) {
  const Storage& storage = *source.piece.storage;
  const auto place = [&](const Copy& copy) {
    return out + static_cast<std::size_t>(copy.to_local - begin) * element_;
  };
  if (!source.dense) {
    for (const Copy& copy : group) read_strided(source, copy, place(copy));
    return;
  }
  const auto at = [&](std::int64_t local) {
    return source.first_byte + static_cast<std::uint64_t>(local) * element_;
  };
  if (storage.data != nullptr) {
    for (const Copy& copy : group) {
      std::memcpy(place(copy), storage.data + at(copy.from_local),
                  static_cast<std::size_t>(copy.count) * element_);
    }
    return;
  }
  if (group.size() == 1) {
    MutableByteView bytes(place(group[0]), static_cast<std::size_t>(group[0].count) * element_);
    std::uint64_t from = at(group[0].from_local);
    // In steps that are still in the cache when the checksum goes over them.
    const std::size_t step = source.follows() ? kFollowedBytes : bytes.size();
    while (!bytes.empty()) {
      const MutableByteView part = bytes.first(std::min(step, bytes.size()));
      storage.source->read_at(storage.offset + from, part);
      source.read += part.size();
      source.follow(from, part, name_);
      bytes = bytes.subspan(part.size());
      from += part.size();
    }
    return;
  }
  const std::int64_t first = group.front().from_local;
  const std::int64_t count = group.back().from_local + group.back().count - first;
  scratch_.resize(static_cast<std::size_t>(count) * element_);
  storage.source->read_at(storage.offset + at(first), scratch_);
  source.read += scratch_.size();
  for (const Copy& copy : group) {
    // What lies between the runs is not followed: who needs it reads it, too.
    const ByteView bytes =
        ByteView(scratch_).subspan(static_cast<std::size_t>(copy.from_local - first) * element_,
                                   static_cast<std::size_t>(copy.count) * element_);
    source.follow(at(copy.from_local), bytes, name_);
    std::memcpy(place(copy), bytes.data(), bytes.size());
  }
}

void TensorReader::read_strided(Source& source, const Copy& copy, std::byte* out) {
  const Storage& storage = *source.piece.storage;
  for_each_strided_run(source.sizes, source.piece.strides, copy.from_local, copy.count,
                       [&](std::int64_t position, std::int64_t count) {
                         const std::uint64_t at =
                             source.first_byte + static_cast<std::uint64_t>(position) * element_;
                         const std::size_t size = static_cast<std::size_t>(count) * element_;
                         if (storage.data != nullptr) {
                           std::memcpy(out, storage.data + at, size);
                         } else {
                           storage.source->read_at(storage.offset + at, {out, size});
                           source.read += size;
                           source.follow(at, {out, size}, name_);
                         }
                         out += size;
                       });
}

std::vector<HandedOver> TensorReader::hand_over(StorageChecks& checks) {
  std::vector<HandedOver> handed;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    Source* source = sources_[i].get();
    if (source == nullptr || source->checked || source->read == 0) continue;
    const std::shared_ptr<Storage>& storage = source->piece.storage;
    if (storage->source->checked() || !has_crc(*storage)) continue;
    const Storage& stored = *tensor_.pieces[i].storage;
    checks.add(stored, storage, source->runs, name_);
    source->checked = true;
    handed.push_back({&stored, std::move(source->runs)});
  }
  return handed;
}

IoReport TensorReader::report() const {
  IoReport report = report_;
  for (const auto& source : sources_) {
    if (!source) continue;
    report.bytes_read += source->read;
    const Storage& storage = *source->piece.storage;
    const bool checked = source->checked || (storage.source && storage.source->checked());
    if (!checked) report.bytes_unchecked += source->read;
  }
  return report;
}

}  // namespace tessera
