// A snapshot of one rank whose tree has other bytes than were written, with digests to match:
// inputs say which. It opens, or says what is wrong.
#include <memory>
#include <vector>

#include "base/digest.h"
#include "checkpoint/open/arena_tree.h"
#include "io/checked_source.h"
#include "storage/arena/arenas.h"
#include "storage/storage.h"
#include "target.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kArena = 4096;

std::vector<std::byte> arena(kArena);

Value tensor_at(std::size_t begin, const Shape& shape, DType dtype) {
  auto storage = std::make_shared<Storage>();
  storage->data = arena.data() + begin;
  storage->size = byte_size(dtype, shape);
  storage->dtype = dtype;
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.pieces.push_back({whole(shape), storage, 0, {}, 0});
  return Value(std::move(tensor));
}

Bytes written() {
  const Value tree =
      Value::dict({{"model", Value::dict({{"w", tensor_at(0, {7, 5}, DType::float32)},
                                          {"b", tensor_at(140, {3}, DType::int64)},
                                          {"none", tensor_at(0, {0}, DType::uint8)}})},
                   {"step", 7},
                   {"names", Value::list({"a", 1.5, Value::tuple({1, 2})})}});
  return with_head({.rank = 0, .size = 1, .writer = "0123456789ab", .number = 3},
                   message_of_tree(tree, arena));
}

}  // namespace

void tessera::fuzz::parse(ByteView input) {
  static const Bytes whole_tree = written();
  Bytes tree = whole_tree;
  for (std::size_t at = 0; at + 2 < input.size(); at += 3) {
    const auto high = std::to_integer<std::size_t>(input[at]);
    const auto low = std::to_integer<std::size_t>(input[at + 1]);
    tree[(high * 256 + low) % tree.size()] ^= input[at + 2];
  }
  BlockDigests blocks;
  blocks.add(0, arena);
  Digests digests = blocks.finish(arena.size());
  digests.insert(digests.begin(), digest64(tree));
  const auto store = memory_store();
  const ArenaNames names = arena_names(0);
  put(*store, names.tree, tree, IfExists::fail);
  put(*store, names.arena, arena, IfExists::fail);
  put(*store, names.digests, std::as_bytes(std::span(digests)), IfExists::fail);
  (void)Checkpoint::open(Location(store));
}
