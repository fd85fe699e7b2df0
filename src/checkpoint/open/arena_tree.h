// A tree whose tensors are places in an arena, as a message.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "comm/message.h"
#include "tessera/value.h"

namespace tessera {

// Of the tree of a snapshot without a pace, whose tensors are in `arena`. What else it leads to
// (encoded items of a checkpoint) goes along.
[[nodiscard]] Bytes message_of_tree(const Value& tree, ByteView arena);

// What a rank's tree belongs to, in front of it.
struct ArenaTreeHead {
  std::int32_t rank = 0, size = 1;
  std::string writer = {};   // who saves, the same on all ranks
  std::uint64_t number = 0;  // of the save, by that writer
};
[[nodiscard]] Bytes with_head(const ArenaTreeHead& head, ByteView tree);
// The head, and `message` becomes the tree. Throws `corrupt`.
[[nodiscard]] ArenaTreeHead take_head(ByteView& message);

// Says where the bytes of a storage are, which begin at `begin` in the arena.
using PlaceStorage = std::function<void(Storage& storage, std::uint64_t begin)>;
// The same tree over an arena of so many bytes. Throws `corrupt` for what is no such message.
[[nodiscard]] Value tree_from_message(ByteView message, std::uint64_t arena_bytes,
                                      const PlaceStorage& place);

}  // namespace tessera
