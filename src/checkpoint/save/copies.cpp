#include "checkpoint/save/copies.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/digest.h"
#include "comm/message.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::int64_t kWindows = 64;
constexpr std::int64_t kWindowBytes = 1024;
constexpr std::size_t kNamedRanks = 16;
constexpr std::size_t kNamedKeys = 100;
constexpr std::size_t kLongestKey = 200;  // bytes

// Ranks that hold the same.
struct Alike {
  std::uint64_t count = 0;
  std::vector<int> ranks;  // the lowest of them
};

// What is known of one chunk or value.
struct Known {
  std::string name;
  int writer = -1;
  std::uint64_t written = 0;
  std::map<std::uint64_t, Alike> digests;
};
using AllKnown = std::map<std::uint64_t, Known>;  // by key

void write_alike(MessageWriter& message, std::uint64_t digest, const Alike& alike) {
  message.number(digest).count(alike.count).count(alike.ranks.size());
  for (const int rank : alike.ranks) message.count(static_cast<std::uint64_t>(rank));
}

Bytes encode(const AllKnown& all) {
  MessageWriter message;
  for (const auto& [key, known] : all) {
    message.number(key).text(known.name);
    message.number(static_cast<std::int32_t>(known.writer)).number(known.written);
    message.count(known.digests.size());
    for (const auto& [digest, alike] : known.digests) write_alike(message, digest, alike);
  }
  return message.take();
}

void read_alike(MessageReader& message, Known& known) {
  Alike& alike = known.digests[message.number<std::uint64_t>()];
  alike.count += message.count();
  for (auto count = message.count(); count > 0; --count) {
    const int rank = static_cast<int>(message.count());
    if (alike.ranks.size() < kNamedRanks) alike.ranks.push_back(rank);
  }
}

// Those of lower ranks first.
void decode_into(AllKnown& all, const Bytes& bytes) {
  for (MessageReader message(bytes); !message.at_end();) {
    Known& known = all[message.number<std::uint64_t>()];
    known.name = message.text();
    const int writer = message.number<std::int32_t>();
    const auto written = message.number<std::uint64_t>();
    if (writer >= 0 && known.writer < 0) known.writer = writer, known.written = written;
    for (auto count = message.count(); count > 0; --count) read_alike(message, known);
  }
}

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

Bytes encode_copies(const std::vector<HeldCopy>& copies, int rank) {
  AllKnown all;
  for (const HeldCopy& copy : copies) {
    Known known{copy.name, copy.is_written ? rank : -1, copy.digest, {}};
    known.digests[copy.digest] = {1, {rank}};
    all.emplace(copy.key, std::move(known));
  }
  return encode(all);
}

Bytes combine_copies(const Bytes& left, const Bytes& right) {
  AllKnown all;
  decode_into(all, left);
  decode_into(all, right);
  return encode(all);
}

UnlikeCopies unlike_copies(const Bytes& copies) {
  AllKnown all;
  decode_into(all, copies);
  std::map<std::string_view, const Known*> unlike;  // by name
  for (const auto& [key, known] : all) {
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

std::map<std::uint64_t, std::uint64_t> written_of_unlike(const Bytes& copies) {
  AllKnown all;
  decode_into(all, copies);
  std::map<std::uint64_t, std::uint64_t> written;
  for (const auto& [key, known] : all) {
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

}  // namespace tessera
