#include "checkpoint/load/opened.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/catalog.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/load/catalog_of.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/side_file.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "storage/arena/arenas.h"
#include "storage/forwarding_store.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

class PatientStore final : public ForwardingStore {
 public:
  PatientStore(std::shared_ptr<Store> store, std::stop_token stop,
               std::function<bool()> is_replaced)
      : ForwardingStore(std::move(store)),
        stop_(std::move(stop)),
        is_replaced_(std::move(is_replaced)) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view object) const override {
    std::shared_ptr<ByteSource> source = open_if_there(inner(), object);
    if (source) return source;
    const bool is_there = look_until(end(), stop_, [&] {
      if (is_replaced_()) return true;
      source = open_if_there(inner(), object);
      return source != nullptr;
    });
    if (source) return source;
    if (is_there) return ForwardingStore::open(object);  // as it is
    throw Error(ErrorCode::incomplete, "rank 0 has opened this file, and it does not appear here")
        .at_path(name() + "/" + std::string(object));
  }

 private:
  // One time for all objects: ranks without a shared disk miss many.
  [[nodiscard]] std::chrono::steady_clock::time_point end() const {
    const std::lock_guard lock(mutex_);
    if (!end_) end_ = std::chrono::steady_clock::now() + visible_within.load();
    return *end_;
  }

  const std::stop_token stop_;
  const std::function<bool()> is_replaced_;
  mutable std::mutex mutex_;
  mutable std::optional<std::chrono::steady_clock::time_point> end_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> patient_store(std::shared_ptr<Store> store, std::stop_token stop,
                                     std::function<bool()> is_replaced) {
  return std::make_shared<PatientStore>(std::move(store), std::move(stop), std::move(is_replaced));
}

namespace {

using Ranks = std::vector<int>;  // whose files a directory has, in ascending order

// On each disk, as one rank sees it.
struct Seer {
  int rank = 0;
  std::string host;
};
using Disks = std::map<Ranks, Seer>;

Bytes encode(const Disks& disks) {
  MessageWriter message;
  for (const auto& [ranks, seer] : disks) {
    message.count(static_cast<std::uint64_t>(seer.rank)).text(seer.host).count(ranks.size());
    for (const int rank : ranks) message.count(static_cast<std::uint64_t>(rank));
  }
  return message.take();
}

Disks decode(const Bytes& bytes) {
  Disks disks;
  for (MessageReader message(bytes); !message.at_end();) {
    Seer seer;
    seer.rank = static_cast<int>(message.count());
    seer.host = message.text();
    Ranks ranks(message.count());
    for (int& rank : ranks) rank = static_cast<int>(message.count());
    disks.emplace(std::move(ranks), std::move(seer));
  }
  return disks;
}

// The lowest of the ranks that see the same stays.
Bytes join(const Bytes& left, const Bytes& right) {
  Disks all = decode(left);
  all.merge(decode(right));
  return encode(all);
}

Ranks ranks_in(const Store& store, CheckpointKind kind) {
  const std::string folder = kind == CheckpointKind::olmo_local ? "model" : "";
  Ranks ranks;
  for (const ObjectInfo& file : deciding_files(store)) {
    if (const auto rank = rank_of_own(file.name, folder)) ranks.push_back(*rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

// What this rank sees; nothing, if it cannot say.
Disks own_disk(const Location& where, const Group& group) {
  try {
    const auto kind = olmo_kind_at(where);
    if (kind != CheckpointKind::olmo_local && kind != CheckpointKind::olmo_legacy) return {};
    return {{ranks_in(*place_of(where).store, *kind), {group.rank(), host_name()}}};
  } catch (const Error&) {
    return {};
  }
}

// "0 to 3, 8"
std::string text_of(const Ranks& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += " to " + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string advice(const Disks& disks) {
  Named named;
  for (const auto& [ranks, seer] : disks)
    named.add(rank_on_host(seer.rank, seer.host) + " has those of ranks " + text_of(ranks));
  return "; the files lie on several disks: " + named.text() +
         ". Ranks that saved them restore from these in the layout that they had; for other ranks "
         "and layouts copy all files into one directory that every rank sees";
}

}  // namespace

void rethrow_with_disks(const Error& error, const Location& where, Group& group) {
  // Without peers this rank alone has it: the group is broken, or is this rank.
  if (error.code() != ErrorCode::incomplete || error.peers().empty()) throw error;
  const auto conclude = [&](const Bytes& all) -> Bytes {
    const Disks disks = decode(all);
    const Error& first = error.peers().begin()->second;
    Error told(first.code(), first.message() + (disks.size() > 1 ? advice(disks) : ""));
    throw told.at_path(first.path());
  };
  confer(group, "opening a checkpoint",
         {[&] { return encode(own_disk(where, group)); }, join, conclude});
  throw error;
}

namespace {

constexpr const char* kOperation = "opening a checkpoint";

// Whose catalog rank 0 has for the others; it says so in front of that.
enum class Opening : std::uint8_t { dcp, other };

Checkpoint opened_at(const Place& place, const OpenOptions& options) {
  Checkpoint checkpoint = open_checkpoint(place, options);
  index_names(checkpoint);
  return checkpoint;
}

// The place where rank 0 has opened a checkpoint. Another rank waits until it sees that.
Place place_on(int rank, const Location& where, const std::stop_token& stop) {
  if (rank == 0) return place_of(where);
  std::optional<Place> place;
  if (is_arena(where.path)) return place_of(where);  // it does not come later
  const bool is_visible = look_until_visible(stop, [&] {
    try {
      place = place_of(where);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_found) throw;
    }
    return place.has_value();
  });
  if (is_visible) return std::move(*place);
  throw Error(ErrorCode::incomplete, "rank 0 has opened a checkpoint, which does not appear here")
      .at_path(to_string(where));
}

// What tells a file on a disk from others, of which each node may have its own: its name, and the
// digest of its end, where an archive has the checksums of all that is in it. Without a name it is
// no such file.
struct FileMark {
  std::string name;
  std::uint64_t end = 0;
};

FileMark mark_of_file(const Location& where, const Place& place) {
  if (!place.object || !is_on_disk(where)) return {};
  return {place.object->name, digest_of_end(*place.store->open(place.object->name))};
}

// What rank 0 has opened is read here, if this is the same.
void require_same_file(const FileMark& first, const Location& where, const Place& place) {
  if (first.name.empty()) return;
  if (!place.object || place.object->name != first.name) {
    throw Error(ErrorCode::mismatch, "rank 0 loads another file: " + printable(first.name, 200))
        .at_path(to_string(where));
  }
  if (mark_of_file(where, place).end != first.end) {
    throw Error(ErrorCode::conflict, "rank 0 has opened another file of this name")
        .at_path(to_string(where));
  }
}

LoadSource by_dcp_catalog(HostCopy told, std::shared_ptr<Store> store, int rank,
                          const std::stop_token& stop) {
  if (rank > 0) {
    const auto is_replaced = [store, head = Catalog(told.bytes().subspan(sizeof(Opening))).head()] {
      const std::string& metadata = head.metadata.front().name;
      return store->exists(metadata) && !is_metadata_of(head, *store->open(metadata));
    };
    store = patient_store(store, stop, is_replaced);
  }
  return {std::move(told), std::move(store)};
}

// Behind Opening::other, in front of the catalog.
struct OtherHead {
  std::uint64_t mark = 0;  // of the save
  FileMark file;
  std::string at;  // where other ranks find what rank 0 has opened; empty: where they look for it
};

MessageWriter begun(const OtherHead& head) {
  MessageWriter message;
  message.number(Opening::other).number(head.mark).text(head.file.name).number(head.file.end);
  message.text(head.at);
  return message;
}

OtherHead head_of(MessageReader& told) {
  OtherHead head;
  head.mark = told.number<std::uint64_t>();
  head.file.name = told.text();
  head.file.end = told.number<std::uint64_t>();
  head.at = told.text();
  return head;
}

// `own`: what rank 0 has opened.
LoadSource by_catalog(MessageReader told, std::uint64_t mark, Place place,
                      std::unique_ptr<Checkpoint> own, const std::stop_token& stop) {
  const std::shared_ptr<Store> store = place.store;
  if (!own) {
    const auto is_replaced = [store, mark] { return mark != 0 && holds_other_save(*store, mark); };
    place.store = patient_store(store, stop, is_replaced);
  }
  LoadSource source(own ? std::move(*own) : opened_by(told.rest(), place), LoadReaders::all);
  source.watch(store, mark);
  return source;
}

}  // namespace

LoadSource::LoadSource(HostCopy catalog, std::shared_ptr<Store> store)
    : catalog_(std::move(catalog)),
      parts_(std::make_unique<OpenedDcp>(catalog_.bytes().subspan(sizeof(Opening)),
                                         std::move(store), false)),
      wanted_(parts_->checkpoint().leaves.size(), Wanted::nothing) {}

LoadSource::LoadSource(Checkpoint contents, LoadReaders readers, std::unique_ptr<Checkpoint> from)
    : readers_(readers),
      owned_(std::make_unique<Checkpoint>(std::move(contents))),
      whole_(owned_.get()),
      from_(std::move(from)) {}

void LoadSource::arrange(Checkpoint shown) {
  std::unordered_map<const void*, std::size_t> stored_at;  // by node
  const std::vector<Leaf>& leaves = stored().leaves;
  for (std::size_t i = 0; i < leaves.size(); ++i) stored_at.emplace(leaves[i].value.identity(), i);
  std::vector<std::optional<std::size_t>> origin;
  for (const Leaf& leaf : shown.leaves) {
    const auto found = stored_at.find(leaf.value.identity());
    const bool known = found != stored_at.end();
    if (!known && leaf.value.is(Value::Kind::tensor)) {
      throw Error(ErrorCode::invalid_argument, "a tensor that is not one of the checkpoint's")
          .at_key(leaf.name);
    }
    origin.push_back(known ? std::optional(found->second) : std::nullopt);
  }
  origin_ = std::move(origin);
  shown_ = std::make_unique<const Checkpoint>(std::move(shown));
}

std::optional<std::size_t> LoadSource::stored_leaf(std::size_t leaf) const {
  return shown_ ? origin_.at(leaf) : std::optional(leaf);
}

std::vector<bool> LoadSource::stored_leaves(const std::vector<bool>& shown) const {
  std::vector<bool> chosen(stored().leaves.size(), false);
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const std::optional<std::size_t> at = stored_leaf(i);
    if (at && shown[i]) chosen[*at] = true;
  }
  return chosen;
}

void LoadSource::want(std::size_t shown, const Tensor& pieces) {
  if (!parts_) return;
  const std::size_t leaf = stored_leaf(shown).value();
  if (wanted_[leaf] == Wanted::all) return;
  if (wanted_[leaf] == Wanted::pieces) return want(shown);
  wanted_[leaf] = Wanted::pieces;
  std::vector<Slice> slices;
  slices.reserve(pieces.pieces.size());
  for (const Piece& piece : pieces.pieces) slices.push_back(piece.slice);
  parts_->give_pieces(leaf, slices);
}

void LoadSource::want(std::size_t shown) {
  const std::optional<std::size_t> leaf = stored_leaf(shown);
  if (!leaf) return;
  if (is_told()) return want_told(*leaf);
  if (!parts_ || wanted_[*leaf] == Wanted::all) return;
  wanted_[*leaf] = Wanted::all;
  parts_->give_pieces(*leaf);
}

void LoadSource::want_told(std::size_t leaf) {
  Value& value = owned_->leaves[leaf].value;
  if (!value.is(Value::Kind::tensor)) {
    if (inner_tensors(value).empty()) return;
    throw Error(ErrorCode::unsupported, "a value that holds tensors, which one rank cannot tell");
  }
  // Nobody reads it: it says that the tensor's elements are known, but those in missing files.
  Tensor& tensor = value.as_tensor();
  auto storage = std::make_shared<Storage>();
  storage->size = byte_size(tensor.dtype, tensor.shape);
  if (std::ranges::none_of(tensor.pieces, is_missing))
    tensor.pieces = {Piece{whole(tensor.shape), storage, 0, {}, -1}};
  for (Piece& piece : tensor.pieces) {
    if (!is_missing(piece)) piece = Piece{piece.slice, storage, 0, {}, -1};
  }
}

void LoadSource::watch(std::shared_ptr<const Store> directory, std::uint64_t mark) {
  watched_ = mark != 0 ? std::move(directory) : nullptr;
  mark_ = mark;
}

void LoadSource::require_same_save() const {
  // A node may have its ranks' files alone.
  if (!watched_ || !holds_other_save(*watched_, mark_)) return;
  throw Error(ErrorCode::conflict, "the checkpoint was replaced while it was loaded")
      .at_path(watched_->name());
}

void LoadSource::require_files(int threads) const {
  if (parts_) parts_->require_files(threads);
}

namespace {

// What rank 0 of so many tells the others. `own`: the checkpoint, unless each opens it by a
// catalog.
Bytes told_by_first(const Location& where, const LoadOptions& options, int ranks,
                    std::unique_ptr<Checkpoint>& own) {
  const bool is_told = options.reader == LoadReader::rank_zero;
  const Place place = place_of(where);
  if (!is_told && is_dcp_directory(place)) {
    require_known_faults(options.open);
    require_presence_used(options.open, CheckpointKind::dcp, place.store->name());
    const Bytes catalog = read_catalog(place.store, options.open.partial);
    if (!has_beside(*place.store, Catalog(catalog)))
      return MessageWriter().number(Opening::dcp).rest(catalog).take();
  }
  OtherHead head;
  if (!is_told && !place.object) head.mark = save_mark_of(*place.store);
  if (!is_told && ranks > 1) head.file = mark_of_file(where, place);
  own = std::make_unique<Checkpoint>(opened_at(place, options.open));
  require_used(options.open, *own);
  // A training that goes on has a newer one when the others come.
  if (own->kind == CheckpointKind::arena && !where.store) head.at = own->store->name();
  const Bytes catalog = is_told || ranks > 1 ? catalog_of(*own, !is_told) : Bytes();
  return begun(head).rest(catalog).take();
}

}  // namespace

LoadSource open_for_load(const Location& where, const LoadOptions& options, Group& group) {
  const bool is_told = options.reader == LoadReader::rank_zero;
  std::unique_ptr<Checkpoint> own;  // rank 0's, unless it is opened by a catalog
  const auto begin = [&] {
    await_saves(where, Looks::at_place, options.stop);
    require_going_on(options.stop);
    require_threads(options.threads);
  };
  const auto open = [&] { return told_by_first(where, options, group.size(), own); };
  HostCopy told;
  try {
    told = copy_to_hosts(group, kOperation, begin, open);
  } catch (const Error& error) {
    rethrow_with_disks(error, where, group);
  }
  std::optional<LoadSource> source;
  agree(group, kOperation, [&] {
    MessageReader message(told.bytes());
    const bool is_dcp = message.number<Opening>() == Opening::dcp;
    const OtherHead head = is_dcp ? OtherHead() : head_of(message);
    if (is_told) {
      source.emplace(opened_by(message.rest(), {.store = nullptr, .path = to_string(where)}),
                     LoadReaders::first, std::move(own));
    } else {
      const Location at = head.at.empty() || group.rank() == 0 ? where : Location(head.at);
      // What is in a store, the catalog tells.
      Place place =
          where.store && !is_dcp ? Place{where.store} : place_on(group.rank(), at, options.stop);
      if (group.rank() > 0) require_same_file(head.file, where, place);
      source = is_dcp
                   ? by_dcp_catalog(std::move(told), place.store, group.rank(), options.stop)
                   : by_catalog(message, head.mark, std::move(place), std::move(own), options.stop);
    }
    if (group.rank() == 0) say_warnings(source->stored());
  });
  return std::move(*source);
}

LoadSource open_own_or_all(const Location& where, const Value& model, const LoadOptions& options,
                           Group& group) {
  std::optional<OwnFiles> own;
  const auto contribute = [&] {
    await_saves(where, Looks::at_place, options.stop);
    require_going_on(options.stop);
    if (options.reader == LoadReader::every_rank)
      own = open_own_files(where, model, {group.rank(), group.size()});
    return shared_values(own);
  };
  const auto conclude = [&](const Bytes& all) {
    Holding holding = holding_of(all);
    if (holding == Holding::files && (!own->can_be_told() || own->sees_all_files()))
      holding = Holding::some_rank;
    return MessageWriter().number(holding).take();
  };
  const Holding all =
      holding_of(confer(group, kOperation, {contribute, combine_shared_values, conclude}));
  if (all == Holding::nothing) return open_for_load(where, options, group);
  if (all == Holding::some_rank) {
    try {
      return open_for_load(where, options, group);
    } catch (const Error& error) {
      if (!error.is_no_checkpoint()) throw;
      throw Error(error.code(), error.message() + "; another rank has files of one")
          .at_path(error.path());
    }
  }
  std::optional<LoadSource> source;
  agree(group, kOperation, [&] {
    auto contents = std::make_unique<Checkpoint>(contents_of(own->checkpoint));
    if (all == Holding::pieces) return void(source.emplace(*contents, LoadReaders::own));
    index_names(*contents);
    Checkpoint common = opened_by(catalog_of(*contents, false), {contents->store});
    source.emplace(std::move(common), LoadReaders::each_own, std::move(contents));
  });
  return std::move(*source);
}

}  // namespace tessera
