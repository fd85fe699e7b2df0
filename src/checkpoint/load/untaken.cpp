// The message: 1 byte of flags; unless the names differ, a digest of the leaves' names (8 bytes)
// and, unless all leaves are taken, a bit a leaf, set where it is not taken.
#include "checkpoint/load/untaken.h"

#include <algorithm>
#include <span>

#include "base/digest.h"
#include "base/endian.h"

namespace tessera {
namespace {

constexpr std::byte kRefused{1};      // by some rank
constexpr std::byte kNamesDiffer{2};  // between ranks
constexpr std::size_t kDigestEnd = 9;

std::uint64_t digest_of_names(const std::vector<Leaf>& leaves) {
  RunningDigest digest;
  for (const Leaf& leaf : leaves) {
    // With the final zero, which parts one name from the next.
    digest.add(std::as_bytes(std::span(leaf.name.c_str(), leaf.name.size() + 1)));
  }
  return digest.value();
}

std::byte bit(std::size_t leaf) {
  return std::byte{1} << static_cast<int>(leaf % 8);
}

bool same_names(const Bytes& a, const Bytes& b) {
  return a.size() > 1 && b.size() > 1 &&
         std::equal(a.begin() + 1, a.begin() + kDigestEnd, b.begin() + 1);
}

}  // namespace

Bytes untaken_message(const std::vector<Leaf>& leaves, const std::vector<std::size_t>& untaken,
                      bool refused) {
  Bytes message = {refused ? kRefused : std::byte{0}};
  append_le(message, digest_of_names(leaves));
  if (untaken.empty()) return message;
  message.resize(kDigestEnd + (leaves.size() + 7) / 8);
  for (const std::size_t leaf : untaken) message[kDigestEnd + leaf / 8] |= bit(leaf);
  return message;
}

Bytes combine_untaken(Bytes left, Bytes right) {
  const std::byte flags = left.front() | right.front();
  if (!same_names(left, right)) return {flags | kNamesDiffer};
  left.front() = flags;
  left.resize(std::min(left.size(), right.size()));
  for (std::size_t i = kDigestEnd; i < left.size(); ++i) left[i] &= right[i];
  return left;
}

std::vector<std::size_t> untaken_by_all(const Bytes& message, std::vector<std::size_t> untaken) {
  if (names_differ(message)) return untaken;
  if (message.size() == kDigestEnd) return {};
  std::erase_if(untaken, [&message](std::size_t leaf) {
    return (message[kDigestEnd + leaf / 8] & bit(leaf)) == std::byte{0};
  });
  return untaken;
}

bool names_differ(const Bytes& message) {
  return (message.front() & kNamesDiffer) != std::byte{0};
}

bool any_refuses(const Bytes& message) {
  return (message.front() & kRefused) != std::byte{0};
}

}  // namespace tessera
