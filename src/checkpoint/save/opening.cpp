#include "checkpoint/save/opening.h"

#include "base/digest.h"
#include "comm/message.h"

namespace tessera {

std::uint64_t digest_of(const std::vector<PlannedLeaf>& leaves) {
  RunningDigest digest;
  for (const PlannedLeaf& leaf : leaves) {
    MessageWriter message;
    write_leaf(message, leaf);
    digest.add(message.take());
  }
  return digest.value();
}

Bytes encode_intents(const Intents& intents) {
  MessageWriter message;
  message.number(intents.first.leaves).number(intents.first.values);
  message.count(intents.first.tells ? 1 : 0);
  message.count(intents.same_leaves ? 1 : 0).count(intents.same_values ? 1 : 0);
  write_unseeing(message, intents.unseeing);
  return message.take();
}

Intents decode_intents(const Bytes& bytes) {
  MessageReader message(bytes);
  Intents intents;
  intents.first.leaves = message.number<std::uint64_t>();
  intents.first.values = message.number<std::uint64_t>();
  intents.first.tells = message.count() == 1;
  intents.same_leaves = message.count() == 1;
  intents.same_values = message.count() == 1;
  intents.unseeing = read_unseeing(message);
  return intents;
}

Bytes combine_intents(const Bytes& left, const Bytes& right) {
  Intents both = decode_intents(left);
  const Intents more = decode_intents(right);
  both.same_leaves = both.same_leaves && more.same_leaves && both.first.leaves == more.first.leaves;
  both.same_values = both.same_values && more.same_values && both.first.values == more.first.values;
  both.first.tells = both.first.tells || more.first.tells;
  both.unseeing.add(more.unseeing);
  return encode_intents(both);
}

Bytes encode_opening(const Opening& opening) {
  MessageWriter message;
  message.text(opening.save_id).text(opening.attempt);
  message.count(static_cast<std::uint64_t>(opening.rules.ranks));
  message.count(static_cast<std::uint64_t>(opening.rules.files.most));
  message.count(opening.rules.files.one_an_item ? 1 : 0);
  message.count(static_cast<std::uint64_t>(opening.rules.files.compression));
  message.count(static_cast<std::uint64_t>(opening.rules.files.level));
  message.count(static_cast<std::uint64_t>(opening.rules.replicas));
  message.count(opening.rules.everything_told ? 1 : 0);
  message.count(opening.tells ? 1 : 0).count(opening.compare_values ? 1 : 0);
  message.count(opening.keep_values ? 1 : 0);
  message.count(static_cast<std::uint64_t>(opening.copies)).count(opening.is_seen_late ? 1 : 0);
  return message.take();
}

Opening decode_opening(const Bytes& bytes) {
  MessageReader message(bytes);
  Opening opening;
  opening.save_id = message.text();
  opening.attempt = message.text();
  opening.rules.ranks = static_cast<int>(message.count());
  opening.rules.files.most = static_cast<int>(message.count());
  opening.rules.files.one_an_item = message.count() == 1;
  opening.rules.files.compression = static_cast<Compression>(message.count());
  opening.rules.files.level = static_cast<int>(message.count());
  opening.rules.replicas = static_cast<ReplicaWriter>(message.count());
  opening.rules.everything_told = message.count() == 1;
  opening.tells = message.count() == 1;
  opening.compare_values = message.count() == 1;
  opening.keep_values = message.count() == 1;
  opening.copies = static_cast<IfDiffers>(message.count());
  opening.is_seen_late = message.count() == 1;
  return opening;
}

}  // namespace tessera
