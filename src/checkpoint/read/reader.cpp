#include "checkpoint/read/reader.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "base/digest.h"
#include "base/numbers.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/reader_source.h"
#include "io/source.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

// Bytes that are read at once when a checksum follows.
constexpr std::size_t kFollowedBytes = 256 << 10;

constexpr std::uint64_t kUnfoldedBytes = std::uint64_t{16} << 30;
constexpr std::uint64_t kUnfoldedTimes = 1000;

// Whether elements that follow each other lie in the other order, so that a window of the tensor
// is scattered over the file.
bool is_scattered(const Shape& sizes, const Shape& strides) {
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  for (std::size_t d = 0; d < strides.size(); ++d) {
    if (sizes[d] == 1 || strides[d] == 0) continue;
    if (std::abs(strides[d]) > before) return true;
    before = std::abs(strides[d]);
  }
  return false;
}

bool is_dense(const Shape& sizes, const Shape& strides) {
  if (strides.empty() || numel(sizes) <= 1) return true;
  const Shape dense = contiguous_strides(sizes);
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != dense[d]) return false;
  }
  return true;
}

// What is compressed may well be a thousand times smaller.
bool has_known_size(const Storage& storage) {
  return !is_in_memory(storage) && storage.encoding != Encoding::torch_item_zstd;
}

// `element`: bytes of one.
bool unfolds(const Storage& storage, std::uint64_t count, std::size_t element) {
  return count > kUnfoldedBytes / element && count / kUnfoldedTimes > storage.size / element;
}

// How many of the copies, at least one, lie so near each other that they are read together.
std::size_t count_near(std::span<const Copy> copies, std::int64_t gap, std::int64_t span) {
  const std::int64_t first = copies.front().from_local;
  std::size_t count = 1;
  for (; count < copies.size(); ++count) {
    const Copy& previous = copies[count - 1];
    const Copy& copy = copies[count];
    const bool near = copy.from_local - (previous.from_local + previous.count) <= gap;
    const bool small = copy.from_local + copy.count - first <= span;
    if (!near || !small) break;
  }
  return count;
}

// The first copies, as far as they are from one piece.
std::span<const Copy> of_first_piece(std::span<const Copy> copies) {
  const auto other = std::ranges::find_if(
      copies, [&](const Copy& copy) { return copy.from != copies.front().from; });
  return {copies.begin(), other};
}

// For each piece.
std::vector<std::int64_t> free_gaps(const Tensor& tensor) {
  std::vector<std::int64_t> free;
  for (const Piece& piece : tensor.pieces) {
    const bool is_stored = piece.storage && piece.storage->source;
    free.push_back(free_gap_of(is_stored ? piece.storage->source->request_cost() : kNearRequest));
  }
  return free;
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
  const Traffic traffic = traffic_.total();
  const std::lock_guard lock(mutex_);
  IoReport report = total_;
  report.requests = traffic.requests;
  report.retries = traffic.retries;
  report.bytes_again = traffic.bytes_again;
  return report;
}

void require_bounded(const Tensor& tensor, const std::string& name) {
  const std::size_t element = size_of(tensor.stored.value_or(tensor.dtype));
  for (const Piece& piece : tensor.pieces) {
    const Storage* storage = piece.storage.get();
    if (storage == nullptr || !has_known_size(*storage)) continue;
    const auto count = narrow<std::uint64_t>(numel(piece.slice));
    if (!unfolds(*storage, count, element)) continue;
    throw Error(ErrorCode::limit, std::to_string(count) + " elements of " +
                                      std::to_string(element) + " bytes are made of " +
                                      std::to_string(storage->size) + " stored bytes")
        .at_path(path_of(*storage))
        .at_key(name);
  }
}

TensorReader::TensorReader(const Tensor& tensor, std::string name, std::size_t tile_bytes)
    : tensor_(tensor),
      name_(std::move(name)),
      stored_(tensor.stored.value_or(tensor.dtype)),
      element_(size_of(stored_)),
      tile_bytes_(tile_bytes) {
  require_bounded(tensor, name_);
  for (const Piece& piece : tensor.pieces) slices_.push_back(piece.slice);
  sources_.resize(tensor.pieces.size());
}

TensorReader::~TensorReader() = default;

TensorReader::Source& TensorReader::source(std::size_t index) {
  if (!sources_[index]) {
    auto made = std::make_unique<Source>();
    made->piece = decoded_piece(tensor_, tensor_.pieces[index], name_);
    made->sizes = array_of(made->piece.slice);
    made->dense = is_dense(made->sizes, made->piece.strides);
    made->scattered = !made->dense && made->piece.storage->data == nullptr &&
                      is_scattered(made->sizes, made->piece.strides);
    made->first_byte =
        checked_mul<std::uint64_t>(narrow<std::uint64_t>(made->piece.storage_offset), element_);
    if (const auto& device = made->piece.storage->device) {
      const auto size = narrow<std::uint64_t>(numel(made->sizes)) * element_;
      made->device.emplace(device, made->first_byte, made->first_byte + size);
    }
    // Digests say more than a CRC-32 does.
    made->followed = !made->is_checked();
    sources_[index] = std::move(made);
  }
  return *sources_[index];
}

void TensorReader::prepare_plan(const Slice& target) {
  if (planned_ == target) return;
  const Slice targets[] = {target};
  plan_ = plan_copies(tensor_.shape, slices_, targets);
  require_filled(tensor_.shape, targets, plan_);
  gaps_ = gaps_to_close(plan_, free_gaps(tensor_), element_);
  planned_ = target;
  taken_.assign(slices_.size(), 0);
  for (const Copy& copy : plan_) taken_[copy.from] += copy.count;
  tiled_ = false;
  tile_ = {};
  for (const auto& source : sources_) {
    if (source) source->takes_all.reset();
  }
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
    std::byte* const made = out + static_cast<std::size_t>(done) * size_of(tensor_.dtype);
    cast(stored_, unconverted_.data(), tensor_.dtype, made, part);
    add_loss(stored_, unconverted_.data(), tensor_.dtype, made, part, loss_);
  }
}

ByteView TensorReader::view(const Slice& target, std::int64_t begin, std::int64_t count) {
  if (stored_ != tensor_.dtype) return {};
  prepare_plan(target);
  const std::vector<Copy> window = window_of(begin, count);
  if (window.size() != 1 || window[0].count != count) return {};
  const Source& from = source(window[0].from);
  const Piece& piece = from.piece;
  const bool is_there = piece.storage->data != nullptr && from.dense && !piece.conj && !piece.neg;
  if (!is_there) return {};
  const std::uint64_t at =
      from.first_byte + static_cast<std::uint64_t>(window[0].from_local) * element_;
  return {piece.storage->data + at, static_cast<std::size_t>(count) * element_};
}

void TensorReader::read_stored(const Slice& target, std::int64_t begin, std::int64_t count,
                               std::byte* out) {
  prepare_plan(target);
  report_.bytes_needed += static_cast<std::uint64_t>(count) * element_;
  if (!tiled_) {
    const std::vector<Copy> window = window_of(begin, count);
    tiled_ = std::any_of(window.begin(), window.end(),
                         [this](const Copy& copy) { return source(copy.from).scattered; });
  }
  if (tiled_) {
    read_tiled(begin, count, out);
  } else {
    read_window(begin, count, out);
  }
}

// The parts of the plan's copies that lie in a window of the target.
std::vector<Copy> TensorReader::window_of(std::int64_t begin, std::int64_t count) const {
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
  return window;
}

void TensorReader::read_window(std::int64_t begin, std::int64_t count, std::byte* out) {
  std::vector<Copy> window = window_of(begin, count);
  // Sorted by piece, and within a piece in its own order: that is the order of its bytes.
  std::stable_sort(window.begin(), window.end(), [](const Copy& a, const Copy& b) {
    return std::pair(a.from, a.from_local) < std::pair(b.from, b.from_local);
  });
  for (std::span<const Copy> rest = window; !rest.empty();) {
    const std::span<const Copy> copies = of_first_piece(rest);
    rest = rest.subspan(copies.size());
    Source& from = source(copies.front().from);
    if (from.dense) {
      read_dense(from, copies, begin, out);
    } else {
      read_strided(from, copies, begin, count, out);
    }
    for (const Copy& part : copies) {
      resolve_bits(from.piece, stored_,
                   out + static_cast<std::size_t>(part.to_local - begin) * element_, part.count);
    }
  }
}

void TensorReader::read_dense(Source& source, std::span<const Copy> copies, std::int64_t begin,
                              std::byte* out) {
  const std::int64_t span = kSpanBytes / static_cast<std::int64_t>(element_);
  const std::int64_t gap = gaps_[copies.front().from];
  while (!copies.empty()) {
    const std::size_t taken = count_near(copies, gap, span);
    read_group(source, copies.first(taken), begin, out);
    copies = copies.subspan(taken);
  }
}

void TensorReader::read_group(Source& source, std::span<const Copy> group, std::int64_t begin,
                              std::byte* out) {
  const Storage& storage = *source.piece.storage;
  const auto place = [&](const Copy& copy) {
    return MutableByteView(out + static_cast<std::size_t>(copy.to_local - begin) * element_,
                           static_cast<std::size_t>(copy.count) * element_);
  };
  const auto at = [&](std::int64_t local) {
    return source.first_byte + static_cast<std::uint64_t>(local) * element_;
  };
  if (storage.data != nullptr) {
    for (const Copy& copy : group) {
      const MutableByteView target = place(copy);
      std::memcpy(target.data(), storage.data + at(copy.from_local), target.size());
    }
    return;
  }
  if (source.device) return read_device_group(source, group, begin, out);
  if (group.size() == 1) return read_run(source, at(group[0].from_local), place(group[0]));
  const std::int64_t first = group.front().from_local;
  const std::int64_t count = group.back().from_local + group.back().count - first;
  scratch_.resize(static_cast<std::size_t>(count) * element_);
  storage.source->read_at(storage.offset + at(first), scratch_);
  source.read += scratch_.size();
  for (const Copy& copy : group) {
    const MutableByteView target = place(copy);
    // What lies between the runs is not followed: who needs it reads it, too.
    const ByteView bytes = ByteView(scratch_).subspan(
        static_cast<std::size_t>(copy.from_local - first) * element_, target.size());
    source.follow(at(copy.from_local), bytes, name_);
    std::memcpy(target.data(), bytes.data(), bytes.size());
  }
}

// As read_group, of a device: many runs that lie near each other are one copy.
void TensorReader::read_device_group(Source& source, std::span<const Copy> group,
                                     std::int64_t begin, std::byte* out) {
  const std::int64_t first = group.front().from_local;
  const std::uint64_t from = source.first_byte + static_cast<std::uint64_t>(first) * element_;
  const auto bytes_of = [this](std::int64_t elements) {
    return static_cast<std::size_t>(elements) * element_;
  };
  if (group.size() == 1) {
    source.device->read(from,
                        {out + bytes_of(group[0].to_local - begin), bytes_of(group[0].count)});
    return;
  }
  const std::int64_t count = group.back().from_local + group.back().count - first;
  const ByteView bytes = source.device->view(from, bytes_of(count));
  for (const Copy& copy : group) {
    std::memcpy(out + bytes_of(copy.to_local - begin),
                bytes.data() + bytes_of(copy.from_local - first), bytes_of(copy.count));
  }
}

// One run, straight into its place. `from`: its first byte in the storage.
void TensorReader::read_run(Source& source, std::uint64_t from, MutableByteView out) {
  const Storage& storage = *source.piece.storage;
  // In steps that are still in the cache when the checksum goes over them.
  const bool is_near = storage.source->request_cost() <= kNearRequest;
  const std::size_t step = source.follows() && is_near ? kFollowedBytes : out.size();
  while (!out.empty()) {
    const MutableByteView part = out.first(std::min(step, out.size()));
    storage.source->read_at(storage.offset + from, part);
    source.read += part.size();
    source.follow(from, part, name_);
    out = out.subspan(part.size());
    from += part.size();
  }
}

void TensorReader::hand_over(StorageChecks& checks) {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    Source* source = sources_[i].get();
    if (source == nullptr || source->read == 0 || source->is_checked()) continue;
    const std::shared_ptr<Storage>& storage = source->piece.storage;
    if (!has_crc(*storage)) continue;
    checks.add(*tensor_.pieces[i].storage, storage, source->runs, name_);
    source->checked = true;
  }
}

IoReport TensorReader::report() const {
  IoReport report = report_;
  for (const auto& source : sources_) {
    if (!source) continue;
    report.bytes_read += source->read;
    if (!source->is_checked()) report.bytes_unchecked += source->read;
  }
  return report;
}

std::uint64_t digest_of_slice(const Tensor& tensor, const std::string& name, const Slice& slice) {
  constexpr std::size_t kWindow = 1 << 20;  // bytes
  const std::size_t element = size_of(tensor.dtype);
  const std::int64_t count = numel(slice);
  const auto step = static_cast<std::int64_t>(kWindow / element);
  std::vector<std::byte> window(static_cast<std::size_t>(std::min(step, count)) * element);
  TensorReader reader(tensor, name);
  RunningDigest digest;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t part = std::min(step, count - begin);
    reader.read(slice, begin, part, window.data());
    digest.add(ByteView(window).first(static_cast<std::size_t>(part) * element));
  }
  return digest.value();
}

// Tensors whose elements are computed when they are read.

namespace {

class ComputedSource final : public ByteSource {
 public:
  ComputedSource(std::size_t element, std::uint64_t size, ElementFunction elements)
      : element_(element), size_(size), elements_(std::move(elements)) {}

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return name_; }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (out.empty()) return;
    const std::uint64_t first = offset / element_;
    const std::uint64_t last = (offset + out.size() - 1) / element_;
    const FlatRange range{static_cast<std::int64_t>(first), static_cast<std::int64_t>(last + 1)};
    if (offset % element_ == 0 && out.size() % element_ == 0) {
      elements_(range, out);
      return;
    }
    std::vector<std::byte> whole(static_cast<std::size_t>(last + 1 - first) * element_);
    elements_(range, whole);
    std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(offset - first * element_), out.size(),
                out.begin());
  }

 private:
  std::size_t element_;
  std::uint64_t size_;
  ElementFunction elements_;
  const std::string name_ = "a computed tensor";
};

}  // namespace

Tensor computed_tensor(DType dtype, const Shape& shape, ElementFunction elements) {
  auto storage = std::make_shared<Storage>();
  storage->dtype = dtype;
  storage->size = byte_size(dtype, shape);
  storage->source =
      std::make_shared<ComputedSource>(size_of(dtype), storage->size, std::move(elements));
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.pieces.push_back({whole(shape), std::move(storage), 0, {}, -1});
  return tensor;
}

}  // namespace tessera
