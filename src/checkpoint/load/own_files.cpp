#include "checkpoint/load/own_files.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/side_file.h"
#include "comm/message.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::size_t kWholeText = 64 << 20;  // bytes of a value as text

std::optional<Place> directory_of(const Location& where) {
  try {
    Place place = place_of(where);
    if (!place.object) return place;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
  }
  return std::nullopt;
}

bool holds(const Checkpoint& named, const Leaf& wanted) {
  if (!wanted.value.is(Kind::tensor) || wants_nothing(wanted.value.as_tensor())) return true;
  const Leaf* found = named.find(wanted.name);
  if (found == nullptr || !found->value.is(Kind::tensor)) return false;
  try {
    require_held(wanted.value.as_tensor(), found->value.as_tensor());
  } catch (const Error& error) {
    if (!is_one_of(error.code(), ErrorCode::incomplete, ErrorCode::mismatch)) throw;
    return false;
  }
  return true;
}

// `own` with what is below these keys alone.
Checkpoint parts_of(const Checkpoint& own, std::initializer_list<std::string_view> keys) {
  return own.map([&](Leaf leaf) -> std::optional<Leaf> {
    const bool there = std::ranges::any_of(keys, [&](std::string_view key) {
      return !leaf.path.empty() && step_text(leaf.path[0]) == key;
    });
    return there ? std::optional(std::move(leaf)) : std::nullopt;
  });
}

bool holds_all(const Checkpoint& own, const Value& model) {
  const std::vector<Leaf> wanted = flatten(Value::dict({{"model", model}}));
  LiveNames live;
  for (const Leaf& leaf : wanted)
    live.names.push_back(dotted({leaf.path.begin() + 1, leaf.path.end()}));
  const Checkpoint named = as_training_state(parts_of(own, {"model"}), live);
  return std::ranges::all_of(wanted, [&](const Leaf& leaf) { return holds(named, leaf); });
}

std::uint64_t digest_of(const Value& value) {
  const std::string text = render(value, kWholeText);
  return digest64(std::as_bytes(std::span(text)));
}

// A digest of what a leaf must have on all ranks; none: it is each rank's own.
std::optional<std::uint64_t> digest_of_shared(const Leaf& leaf) {
  if (!leaf.value.is(Kind::tensor)) return digest_of(leaf.value);
  const Tensor& tensor = leaf.value.as_tensor();
  if (tensor.sharded) return std::nullopt;
  return digest_of_slice(tensor, leaf.name, whole(tensor.shape));
}

}  // namespace

std::vector<std::string> names_of_own(CheckpointKind kind, int rank) {
  if (kind == CheckpointKind::olmo_legacy) return {own_file("", rank)};
  return {own_file("model", rank), own_file("optim", rank), own_file("train", rank)};
}

// A part of what open_local and open_rank_files make of all.
std::optional<Checkpoint> read_own_files(std::shared_ptr<Store> directory,
                                         const sharded::Rank& rank) {
  const bool is_local = directory->exists(own_file("model", rank.rank));
  if (!is_local && !directory->exists(own_file("", rank.rank))) return std::nullopt;
  const RankStore from{directory};
  Checkpoint own;
  own.path = directory->name();
  own.world_size = rank.world;
  own.kind = is_local ? CheckpointKind::olmo_local : CheckpointKind::olmo_legacy;
  // Beside the files of another kind these are not what is opened.
  if (olmo_kind_of(*directory) != own.kind) return std::nullopt;
  if (is_local && world_of_local(*directory) != rank.world) return std::nullopt;
  std::optional<Value> tree =
      is_local ? read_local_part(from, rank.rank) : read_legacy_part(from, rank);
  if (!tree) return std::nullopt;
  own.store = std::move(directory);
  own.root = *tree;
  own.leaves = leaves_of(*tree);
  index_names(own);
  return own;
}

std::optional<int> lowest_rank_in(const Store& directory, int world) {
  for (int rank = 0; rank < world; ++rank) {
    if (directory.exists(own_file("model", rank)) || directory.exists(own_file("", rank)))
      return rank;
  }
  return std::nullopt;
}

bool wants_nothing(const Tensor& wanted) {
  return std::ranges::none_of(wanted.pieces, [](const Piece& piece) {
    return piece.storage != nullptr && numel(piece.slice) > 0;
  });
}

void require_held(const Tensor& wanted, const Tensor& found) {
  if (wanted.shape != found.shape) {
    throw Error(ErrorCode::mismatch, "the checkpoint's shape is " + to_string(found.shape) +
                                         ", expected " + to_string(wanted.shape));
  }
  std::vector<Slice> from, to;
  for (const Piece& piece : found.pieces) from.push_back(piece.slice);
  for (const Piece& piece : wanted.pieces) {
    if (piece.storage != nullptr) to.push_back(piece.slice);
  }
  require_filled(wanted.shape, to, plan_copies(wanted.shape, from, to));
}

std::optional<OwnFiles> open_own_files(const Location& where, const Value& model,
                                       const sharded::Rank& rank) {
  const std::optional<Place> place = directory_of(where);
  if (!place) return std::nullopt;
  if (place->store->exists(kDcpMetadata)) return std::nullopt;
  std::optional<Checkpoint> own = read_own_files(guard_present(place->store), rank);
  if (!own) return std::nullopt;
  const bool has_all = holds_all(*own, model);
  return OwnFiles{std::move(*own), has_all};
}

bool OwnFiles::sees_all_files() const {
  const bool is_legacy = checkpoint.kind == CheckpointKind::olmo_legacy;
  for (int rank = 0; rank < checkpoint.world_size; ++rank) {
    if (!checkpoint.store->exists(own_file(is_legacy ? "" : "model", rank))) return false;
  }
  return true;
}

Bytes shared_values(const std::optional<OwnFiles>& files) {
  MessageWriter message;
  if (!files) return message.number(Holding::nothing).take();
  message.number(files->holds_all ? Holding::pieces : Holding::files);
  const Checkpoint* own = &files->checkpoint;
  // What a save leaves beside its files, on each node the same.
  if (const std::uint64_t mark = save_mark_of(*own->store); mark != 0)
    message.text(kStateFile).number(mark);
  for (const Leaf& leaf : own->leaves) {
    if (const auto digest = digest_of_shared(leaf)) message.text(leaf.name).number(*digest);
  }
  return message.take();
}

Bytes combine_shared_values(const Bytes& left, const Bytes& right) {
  const auto [both, either] = std::minmax({holding_of(left), holding_of(right)});
  if (both < Holding::files)
    return MessageWriter().number(std::min(either, Holding::some_rank)).take();
  std::map<std::string, std::uint64_t> digests;
  for (const Bytes* side : {&left, &right}) {
    MessageReader message(*side);
    (void)message.number<std::uint8_t>();
    while (!message.at_end()) {
      const std::string name = message.text();
      const auto digest = message.number<std::uint64_t>();
      if (digests.emplace(name, digest).first->second == digest) continue;
      throw Error(ErrorCode::mismatch,
                  "the files of two ranks have other values here: they are not of one save")
          .at_key(printable(name));
    }
  }
  MessageWriter combined;
  combined.number(both);
  for (const auto& [name, digest] : digests) combined.text(name).number(digest);
  return combined.take();
}

Checkpoint contents_of(const Checkpoint& own) {
  return parts_of(own, {"model", "optim"});
}

Holding holding_of(const Bytes& message) {
  return MessageReader(message).number<Holding>();
}

}  // namespace tessera
