#include "checkpoint/together/file_sums.h"

#include "comm/message.h"

namespace tessera {

Bytes encode_sums(const FileSums& sums) {
  MessageWriter message;
  for (const auto& [at, sum] : sums)
    message.count(at.first).count(at.second).count(sum.bytes).number(sum.terms);
  return message.take();
}

FileSums decode_sums(const Bytes& bytes) {
  FileSums sums;
  for (MessageReader message(bytes); !message.at_end();) {
    const auto file = static_cast<std::uint32_t>(message.count());
    const auto record = static_cast<std::uint32_t>(message.count());
    const std::uint64_t size = message.count();
    sums[{file, record}].add({size, message.number<std::uint32_t>()});
  }
  return sums;
}

Bytes combine_sums(const Bytes& left, const Bytes& right) {
  FileSums both = decode_sums(left);
  for (const auto& [at, sum] : decode_sums(right)) both[at].add(sum);
  return encode_sums(both);
}

}  // namespace tessera
