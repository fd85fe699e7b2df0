#include "checkpoint/save/copies.h"

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/parallel.h"
#include "checkpoint/save/proposals.h"
#include "value/render.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr std::int64_t kWindows = 64;
constexpr std::int64_t kWindowBytes = 1024;
constexpr std::size_t kNamedRanks = 16;
constexpr std::size_t kNamedKeys = 100;
constexpr std::size_t kLongestKey = 200;  // bytes

// Digests of different things must not cancel each other out.
std::uint64_t mixed(std::uint64_t key, std::uint64_t digest) {
  const std::uint64_t both[] = {key, digest};
  return digest64(std::as_bytes(std::span(both)));
}

std::string plural(std::size_t count, const char* what) {
  return std::to_string(count) + " more " + what + (count == 1 ? "" : "s");
}

}  // namespace

std::vector<FlatRange> sampled(std::int64_t count, std::size_t element_size) {
  const std::int64_t window = kWindowBytes / static_cast<std::int64_t>(element_size);
  const bool is_small = count <= kWindows * window;
  std::vector<FlatRange> windows;
  for (std::int64_t i = 0; i < kWindows; ++i) {
    const auto begin = is_small ? window * i : (count - window) * i / (kWindows - 1);
    if (begin >= count) break;
    windows.push_back({begin, std::min(begin + window, count)});
  }
  return windows;
}

std::uint64_t sample_of(const ElementSource& elements, std::int64_t count,
                        std::size_t element_size) {
  std::vector<std::byte> scratch(kWindowBytes);
  RunningDigest digest;
  for (const FlatRange& window : sampled(count, element_size))
    digest.add(elements(window.begin, window.end - window.begin, MutableByteView(scratch)));
  return digest.value();
}

std::uint64_t copies_term(const std::vector<HeldCopy>& copies) {
  std::uint64_t sum = 0;
  for (const HeldCopy& copy : copies) {
    const std::uint64_t term = mixed(copy.key, copy.digest);
    const auto others = static_cast<std::uint64_t>(copy.holders - 1);
    sum += copy.is_written ? others * term : std::uint64_t{0} - term;
  }
  return sum;
}

KnownCopies known_copies(const std::vector<HeldCopy>& copies, int rank) {
  KnownCopies all;
  for (const HeldCopy& copy : copies) {
    KnownCopy known{copy.name, copy.is_written ? rank : -1, copy.digest, {}};
    known.digests[copy.digest] = {1, {rank}};
    all.emplace(copy.key, std::move(known));
  }
  return all;
}

void join_copies(KnownCopies& all, const KnownCopies& more) {
  for (const auto& [key, higher] : more) {
    KnownCopy& known = all.try_emplace(key, KnownCopy{higher.name}).first->second;
    if (known.writer < 0 && higher.writer >= 0)
      known.writer = higher.writer, known.written = higher.written;
    for (const auto& [digest, others] : higher.digests) {
      Alike& alike = known.digests[digest];
      alike.count += others.count;
      alike.ranks.insert(alike.ranks.end(), others.ranks.begin(), others.ranks.end());
      if (alike.ranks.size() > kNamedRanks) alike.ranks.resize(kNamedRanks);
    }
  }
}

UnlikeCopies unlike_copies(const KnownCopies& copies) {
  std::map<std::string_view, const KnownCopy*> unlike;  // by name
  for (const auto& [key, known] : copies) {
    if (known.digests.size() > 1) unlike.emplace(known.name, &known);
  }
  UnlikeCopies found;
  for (const auto& [name, known] : unlike) {
    if (found.keys.size() == kNamedKeys) {
      ++found.more;
      continue;
    }
    found.keys.emplace_back(name);
    if (found.keys.size() > 1) continue;
    found.writer = known->writer;
    for (const auto& [digest, alike] : known->digests) {
      if (digest == known->written) continue;
      found.unlike.insert(found.unlike.end(), alike.ranks.begin(), alike.ranks.end());
      found.more_ranks += alike.count;
    }
    std::ranges::sort(found.unlike);
    if (found.unlike.size() > kNamedRanks) found.unlike.resize(kNamedRanks);
    found.more_ranks -= found.unlike.size();
  }
  return found;
}

std::map<std::uint64_t, std::uint64_t> written_of_unlike(const KnownCopies& copies) {
  std::map<std::uint64_t, std::uint64_t> written;
  for (const auto& [key, known] : copies) {
    if (known.digests.size() > 1) written.emplace(key, known.written);
  }
  return written;
}

std::string to_string(const UnlikeCopies& copies) {
  std::string ranks;
  for (const int rank : copies.unlike) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  if (copies.more_ranks > 0) ranks += " and " + plural(copies.more_ranks, "rank");
  const bool one = copies.unlike.size() + copies.more_ranks == 1;
  std::string text = std::string(one ? "rank " : "ranks ") + ranks + (one ? " holds" : " hold") +
                     " other values of '" + printable(copies.keys.front(), kLongestKey) +
                     "' than rank " + std::to_string(copies.writer) + ", the one that writes them";
  const std::size_t others = copies.keys.size() - 1 + copies.more;
  if (others > 0) text += "; so it is with " + plural(others, "key") + ": ";
  for (std::size_t i = 1; i < copies.keys.size(); ++i)
    text += (i > 1 ? ", '" : "'") + printable(copies.keys[i], kLongestKey) + "'";
  if (copies.more > 0) text += ", ...";
  return text + ". A parameter that no unit holds, or a buffer that each rank changes by itself?";
}

namespace {

bool is_whole(const Tensor& tensor, const std::vector<HeldChunk>& chunks) {
  return chunks.size() == 1 && chunks.front().box == whole(tensor.shape);
}

std::uint64_t key_of_whole(const std::string& name, const Tensor& tensor) {
  Shape kind = tensor.shape;
  kind.push_back(static_cast<std::int64_t>(tensor.dtype));
  return key_of(name, kind);
}

}  // namespace

std::vector<HeldCopy> whole_tensors(const HeldLeaves& held, int threads,
                                    const std::stop_token& stop) {
  std::vector<HeldCopy> copies;
  for (std::size_t i = 0; i < held.leaves.size(); ++i) {
    const Leaf& leaf = held.leaves[i];
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    if (!is_whole(tensor, held.chunks[i])) continue;
    copies.push_back(
        {.name = leaf.name, .key = key_of_whole(leaf.name, tensor), .is_written = true, .leaf = i});
  }
  parallel_for(threads, copies.size(), [&](std::size_t i) {
    HeldCopy& copy = copies[i];
    copy.digest = digest_of_chunk(held.leaves[copy.leaf].value.as_tensor(), copy.name,
                                  held.chunks[copy.leaf].front(), stop);
  });
  return copies;
}

Bytes digest_message(const std::vector<HeldCopy>& copies) {
  RunningDigest digest;
  for (const HeldCopy& copy : copies) {
    const std::uint64_t both[] = {copy.key, copy.digest};
    digest.add(std::as_bytes(std::span(both)));
  }
  return MessageWriter().number(digest.value()).take();
}

Bytes combine_same(const Bytes& left, const Bytes& right) {
  return left == right ? left : Bytes();
}

namespace {

constexpr std::size_t kWindow = 1 << 20;  // bytes

// Whether the piece's elements lie in the memory of the host or of a device one after the other, as
// they are meant.
bool is_plain(const Tensor& tensor, const Piece& piece, const Shape& sizes) {
  if (!piece.storage || tensor.stored) return false;  // no elements, then, or of another type
  const bool dense = piece.strides.empty() || piece.strides == contiguous_strides(sizes);
  return dense && !piece.conj && !piece.neg && is_in_memory(*piece.storage);
}

std::uint64_t sample_on_device(const Piece& piece, std::size_t element, std::int64_t count) {
  std::vector<std::byte> bytes;
  std::vector<ReadRange> ranges;
  const std::vector<FlatRange> windows = sampled(count, element);
  for (const FlatRange& window : windows)
    bytes.resize(bytes.size() + static_cast<std::size_t>(window.end - window.begin) * element);
  MutableByteView rest = bytes;
  for (const FlatRange& window : windows) {
    const auto size = static_cast<std::size_t>(window.end - window.begin) * element;
    ranges.push_back({static_cast<std::uint64_t>(piece.storage_offset + window.begin) * element,
                      rest.first(size)});
    rest = rest.subspan(size);
  }
  DeviceReader(piece.storage->device, 0, 0).read_ranges(ranges);
  return sample_of([next = ranges.begin()](std::int64_t, std::int64_t,
                                           MutableByteView) mutable { return (next++)->out; },
                   count, element);
}

}  // namespace

ElementSource elements_of(const Tensor& tensor, const HeldChunk& chunk, TensorReader& reader) {
  if (numel(chunk.box) == 0)
    return [](std::int64_t, std::int64_t, MutableByteView) { return ByteView(); };
  const Piece& piece = tensor.pieces[chunk.piece];
  const std::size_t element = size_of(tensor.dtype);
  if (is_plain(tensor, piece, chunk.box.sizes)) {
    const std::uint64_t first = static_cast<std::uint64_t>(piece.storage_offset) * element;
    const std::uint64_t size = byte_size(tensor.dtype, chunk.box.sizes);
    auto bytes = std::make_shared<StorageReader>(*piece.storage, first, first + size);
    return [bytes = std::move(bytes), first, element](std::int64_t begin, std::int64_t count,
                                                      MutableByteView scratch) {
      return bytes->view(first + static_cast<std::uint64_t>(begin) * element,
                         scratch.first(static_cast<std::size_t>(count) * element));
    };
  }
  return
      [&reader, &chunk, element](std::int64_t begin, std::int64_t count, MutableByteView scratch) {
        reader.read(chunk.box, begin, count, scratch.data());
        return ByteView(scratch).first(static_cast<std::size_t>(count) * element);
      };
}

std::uint64_t sample_of_chunk(const Tensor& tensor, const std::string& name,
                              const HeldChunk& chunk) {
  const std::int64_t count = numel(chunk.box);
  const std::size_t element = size_of(tensor.dtype);
  if (count == 0) return 0;
  const Piece& piece = tensor.pieces[chunk.piece];
  if (is_plain(tensor, piece, chunk.box.sizes) && piece.storage->device)
    return sample_on_device(piece, element, count);
  TensorReader reader(tensor, name);
  return sample_of(elements_of(tensor, chunk, reader), count, element);
}

std::uint64_t digest_of_chunk(const Tensor& tensor, const std::string& name, const HeldChunk& chunk,
                              const std::stop_token& stop) {
  const std::int64_t count = numel(chunk.box);
  const std::size_t element = size_of(tensor.dtype);
  const auto step = std::min<std::int64_t>(count, kWindow / element);
  std::vector<std::byte> scratch(static_cast<std::size_t>(step) * element);
  TensorReader reader(tensor, name);
  const ElementSource elements = elements_of(tensor, chunk, reader);
  RunningDigest digest;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    require_going_on(stop);
    digest.add(elements(begin, std::min(step, count - begin), MutableByteView(scratch)));
  }
  return digest.value();
}

}  // namespace tessera
