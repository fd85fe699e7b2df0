// Which leaves of a checkpoint no rank has taken.
//
// A rank's message is a digest of the leaves' names (8 bytes) and a bit a leaf, set where it has
// not taken the leaf. Most ranks take all and send nothing, and then nothing is left over. The
// answer is the bits that are set in all messages. A message of one byte says that the names
// differ.
#include <algorithm>

#include "base/digest.h"
#include "base/endian.h"
#include "checkpoint/load/load_plan.h"
#include "tessera/comm.h"

namespace tessera {
namespace {

constexpr std::size_t kDigestBytes = 8;

std::uint64_t digest_of_names(const std::vector<Leaf>& leaves) {
  RunningDigest digest;
  for (const Leaf& leaf : leaves) {
    // With the final zero, which parts one name from the next.
    digest.add(std::as_bytes(std::span(leaf.name.c_str(), leaf.name.size() + 1)));
  }
  return digest.value();
}

Bytes message_of(const std::vector<Leaf>& leaves, const std::vector<std::size_t>& untaken) {
  if (untaken.empty()) return {};
  Bytes message;
  append_le(message, digest_of_names(leaves));
  message.resize(kDigestBytes + (leaves.size() + 7) / 8);
  for (const std::size_t at : untaken)
    message[kDigestBytes + at / 8] |= std::byte{1} << static_cast<int>(at % 8);
  return message;
}

bool same_names(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.begin() + kDigestBytes, b.begin());
}

Bytes intersection_of(const std::vector<Bytes>& messages) {
  if (std::ranges::any_of(messages, &Bytes::empty)) return {};
  Bytes common = messages.front();
  for (const Bytes& message : messages) {
    if (!same_names(common, message)) return Bytes(1);
    for (std::size_t i = kDigestBytes; i < common.size(); ++i) common[i] &= message[i];
  }
  return common;
}

}  // namespace

std::vector<std::size_t> untaken_everywhere(const std::vector<Leaf>& leaves,
                                            std::vector<std::size_t> untaken, Group& group) {
  if (group.size() == 1) return untaken;
  const std::vector<Bytes> messages = group.gather(message_of(leaves, untaken));
  const Bytes common = group.broadcast(group.rank() == 0 ? intersection_of(messages) : Bytes());
  if (common.empty()) return {};
  if (common.size() == 1) return untaken;
  std::erase_if(untaken, [&common](std::size_t at) {
    return (common[kDigestBytes + at / 8] & std::byte{1} << static_cast<int>(at % 8)) ==
           std::byte{0};
  });
  return untaken;
}

}  // namespace tessera
