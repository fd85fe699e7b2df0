#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/parallel.h"
#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/load/fill.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/read/guard.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "layout/boxes.h"
#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "tessera/stateful.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

// A part of a state and the tree in which it is saved or loaded.
Value tree_of(const StatePart& part) {
  if (const auto* tree = std::get_if<std::reference_wrapper<Value>>(&part)) return tree->get();
  return std::get<std::reference_wrapper<Stateful>>(part).get().state_dict();
}

Value tree_of(const StateMap& state, Group& group) {
  Value tree = Value::dict();
  agree(group, "asking for the state", [&] {
    for (const auto& [name, part] : state) {
      try {
        tree.set_item(name, tree_of(part));
      } catch (Error& error) {
        throw error.at_key(name);
      }
    }
  });
  return tree;
}

void hand_back(const StateMap& state, const Value& tree, Group& group) {
  // Nothing can fail here. So trees are whole even when an object refuses its state.
  for (const auto& [name, part] : state) {
    if (const auto* own = std::get_if<std::reference_wrapper<Value>>(&part))
      own->get() = tree.at(name);
  }
  agree(group, "handing over the state", [&] {
    for (const auto& [name, part] : state) {
      const auto* object = std::get_if<std::reference_wrapper<Stateful>>(&part);
      if (object == nullptr) continue;
      try {
        object->get().load_state_dict(tree.at(name));
      } catch (Error& error) {
        throw error.at_key(name);
      }
    }
  });
}

// `loading` is a load() of checkpoint.h into the tree that it is given.
LoadReport load_with(const StateMap& state, Group& group,
                     const std::function<LoadReport(Value& tree)>& loading) {
  const Purpose purpose("loading a state");
  Value tree = tree_of(state, group);
  LoadReport report = loading(tree);
  hand_back(state, tree, group);
  return report;
}

}  // namespace

SaveResult save(const StateMap& state, const Location& where, const SaveOptions& options,
                Group& group) {
  const Purpose purpose("saving a state");
  return save(tree_of(state, group), where, options, group);
}

SaveResult save(const StateMap& state, const Location& where, const SaveOptions& options) {
  return save(state, where, options, *solo_group());
}

SaveResult save(const StateMap& state, const Location& where, Group& group) {
  return save(state, where, {}, group);
}

LoadReport load(const StateMap& state, const Location& where, const LoadOptions& options,
                Group& group) {
  return load_with(state, group, [&](Value& tree) { return load(tree, where, options, group); });
}

LoadReport load(const StateMap& state, const Location& where, const LoadOptions& options) {
  return load(state, where, options, *solo_group());
}

LoadReport load(const StateMap& state, const Location& where, Group& group) {
  return load(state, where, {}, group);
}

LoadReport load(const StateMap& state, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group) {
  return load_with(state, group,
                   [&](Value& tree) { return load(tree, checkpoint, options, group); });
}

// Rank 0 finds out of how many ranks the checkpoint is. Where that is the group's number, each rank
// reads its own file; else rank 0 reads, and tells the others (checkpoint-rows O-41, O-51, O-61,
// O-73).

namespace {

constexpr const char* kFindingState = "reading the trainer's state";

using Kind = Value::Kind;

// What rank 0 has for the others; it says so in front of that.
enum class Answer : std::uint8_t {
  none,   // no rank has a state
  own,    // each rank reads its own
  first,  // rank 0's, without random numbers
  full,   // the same, of a checkpoint that has one state
  each,   // a state for each rank
};

// The place where the state of each rank is.
class Found {
 public:
  explicit Found(const Location& where) {
    const Place place = place_of(where);
    if (place.object) refuse_kind(to_string(where));
    store_ = guard_present(place.store);
    const auto olmo = olmo_kind_of(*store_);
    if (!olmo) refuse_kind(store_->name());
    kind_ = *olmo;
  }

  [[nodiscard]] CheckpointKind kind() const { return kind_; }
  [[nodiscard]] const std::string& name() const { return store_->name(); }

  [[nodiscard]] std::string file_of(int rank) const {
    return own_file(kind_ == CheckpointKind::olmo_legacy ? "" : "train", rank);
  }

  [[nodiscard]] bool has(int rank) const {
    return kind_ != CheckpointKind::olmo_full && store_->exists(file_of(rank));
  }

  // A byte for each rank: 1 where its file is listed.
  [[nodiscard]] Bytes listed(int ranks) const {
    std::set<std::string> names;
    for (ObjectInfo& object :
         store_->list_level(kind_ == CheckpointKind::olmo_legacy ? "" : "train"))
      names.insert(std::move(object.name));
    Bytes found;
    for (int rank = 0; rank < ranks; ++rank)
      found.push_back(std::byte{static_cast<std::uint8_t>(names.contains(file_of(rank)) ? 1 : 0)});
    return found;
  }

  // The number of ranks that saved it, by what rank 0's node has.
  [[nodiscard]] int world() const {
    if (kind_ == CheckpointKind::olmo_local) return world_of_local(*store_);
    if (kind_ == CheckpointKind::olmo_torch_new)
      return std::max(ranks_of_data_files("model_and_optim"), ranks_in("train"));
    if (has(0)) {
      if (const auto said = sharded::world_of(file(0))) return std::max(*said, ranks_in(""));
    }
    return ranks_in("");
  }

  // A rank's own, whose tensors are in the file.
  [[nodiscard]] Value state_of(int rank) const {
    if (!has(rank)) {
      throw Error(ErrorCode::incomplete, "the trainer's state of rank " + std::to_string(rank) +
                                             " is missing: there is no " + file_of(rank))
          .at_path(store_->name());
    }
    const Value tree = file(rank);
    if (kind_ != CheckpointKind::olmo_legacy) return tree;
    if (!tree.is(Kind::dict))
      throw Error(ErrorCode::corrupt, "the file holds no dict").at_path(path_of(rank));
    Value own = Value::dict();
    for (const auto& [key, value] : tree.pairs()) {
      if (!is_one_of(key, Value("model"), Value("optim"))) own.set_item(key, value);
    }
    return own;
  }

  // The one of an olmo-full checkpoint.
  [[nodiscard]] std::optional<Value> whole_state() const {
    std::vector<ObjectInfo> used;
    const std::vector<ObjectInfo> files = store_->list_level();
    auto state = read_olmo_part(store_, files, "train", used);
    return state ? std::move(state) : read_olmo_part(store_, files, "other", used);
  }

 private:
  [[noreturn]] static void refuse_kind(const std::string& path) {
    throw Error(ErrorCode::unsupported,
                "the trainer's state of a checkpoint that is none of OLMo's kinds")
        .at_path(path);
  }

  [[nodiscard]] std::string path_of(int rank) const { return store_->name() + "/" + file_of(rank); }

  [[nodiscard]] Value file(int rank) const {
    const std::string name = file_of(rank);
    return read_rank_file({store_}, {name, store_->open(name)->size()});
  }

  // One more than the largest rank in the names of a directory's files.
  [[nodiscard]] int ranks_in(const std::string& directory) const {
    return ranks_of_own(store_->list_level(directory), directory);
  }
  [[nodiscard]] int ranks_of_data_files(const std::string& directory) const {
    int ranks = 0;
    for (const ObjectInfo& file : store_->list_level(directory)) {
      const auto rank = rank_of_data_file(file.name.substr(directory.size() + 1));
      ranks = std::max(ranks, rank.value_or(-1) + 1);
    }
    return ranks;
  }

  std::shared_ptr<Store> store_;
  CheckpointKind kind_ = CheckpointKind::olmo_full;
};

// `tree` with its tensors in memory of their own, all of whose checksums are checked.
Value in_memory(const Value& tree, const std::string& path, const LoadOptions& options) {
  Checkpoint held;
  held.path = path;
  held.root = tree;
  held.leaves = leaves_of(tree);
  LoadOptions own;
  own.threads = options.threads;
  own.stop = options.stop;
  return held.load(own);
}

Value without_random_numbers(const Value& state) {
  if (!state.is(Kind::dict)) return state;
  Value rest = Value::dict(state.pairs(), state.dict_kind());
  rest.erase("rng");
  return rest;
}

void put_state(MessageWriter& message, const Value& state) {
  message.block(torch_file::write(state, "archive"));
}

Value take_state(MessageReader& message, const std::string& path, const LoadOptions& options) {
  const std::span<const std::byte> bytes = message.block();
  return in_memory(torch_file::read(memory_source({bytes.begin(), bytes.end()}, path)), path,
                   options);
}

// What rank 0 has found, and what it keeps for itself.
class Teller {
 public:
  Teller(const Location& where, const LoadOptions& options, int ranks)
      : where_(where), options_(options), ranks_(ranks) {}

  // `anybody`: whether a rank sees a state of its own.
  Bytes conclude(bool anybody) {
    const Found found(where_);
    if (found.kind() == CheckpointKind::olmo_full) return tell_whole(found);
    if (options_.reader == LoadReader::rank_zero) anybody = has_any(found);
    const int world = found.world();
    MessageWriter message;
    if (!anybody) return message.number(Answer::none).take();
    if (world != ranks_) return tell_first(found, world);
    if (options_.reader == LoadReader::every_rank)
      return message.number(Answer::own).rest(found.listed(ranks_)).take();
    message.number(Answer::each);
    for (int rank = 0; rank < ranks_; ++rank)
      put_state(message, in_memory(found.state_of(rank), found.name(), options_));
    return message.take();
  }

  [[nodiscard]] std::optional<Value> take_own() { return std::move(own_); }

 private:
  [[nodiscard]] bool has_any(const Found& found) const {
    bool any = false;
    for (int rank = 0; rank < ranks_; ++rank) any = any || found.has(rank);
    return any;
  }

  Bytes tell_whole(const Found& found) {
    MessageWriter message;
    const std::optional<Value> state = found.whole_state();
    if (!state) return message.number(Answer::none).take();
    own_ = in_memory(*state, found.name(), options_);
    message.number(Answer::full);
    put_state(message, without_random_numbers(*own_));
    return message.take();
  }

  Bytes tell_first(const Found& found, int world) {
    MessageWriter message;
    message.number(Answer::first).number(static_cast<std::int32_t>(world));
    const Value state = without_random_numbers(found.state_of(0));
    put_state(message, in_memory(state, found.name(), options_));
    return message.take();
  }

  const Location& where_;
  const LoadOptions& options_;
  int ranks_;
  std::optional<Value> own_;  // of rank 0 alone
};

using Say = void (*)(LogLevel level, std::string_view message);

void warn(TrainerState& result, Say say, std::string text) {
  say(LogLevel::warning, text);
  result.warnings.push_back(std::move(text));
}

void warn_of_other_ranks(TrainerState& result, int world, const Group& group) {
  warn(result, log_of_all,
       "the checkpoint is of " + std::to_string(world) + " ranks, here are " +
           std::to_string(group.size()) +
           ": every rank gets the trainer's state of rank 0, without its random numbers");
}

// A whole checkpoint has one state, that of rank 0.
void warn_of_one_state(TrainerState& result, const Group& group) {
  if (group.rank() == 0) return;
  warn(result, log,
       "an olmo-full checkpoint has the random numbers of rank 0 alone: this rank gets none");
}

// The step of a state; empty if it tells none.
Bytes step_of(const Value& state) {
  const Value* step = find_entry(state, "global_step");
  MessageWriter message;
  if (step != nullptr) message.text(render(*step, 60));
  return message.take();
}

Bytes same_step(const Bytes& left, const Bytes& right) {
  if (left.empty() || right.empty()) return left.empty() ? right : left;
  if (left != right) {
    throw Error(ErrorCode::mismatch, "ranks have saved the trainer's state at different steps: " +
                                         MessageReader(left).text() + " and " +
                                         MessageReader(right).text())
        .at_key("global_step");
  }
  return left;
}

// Whether the rank sees a state of its own; false too where it sees no checkpoint.
bool sees_own(const Location& where, int rank) {
  try {
    return Found(where).has(rank);
  } catch (const Error& error) {
    if (!is_one_of(error.code(), ErrorCode::not_found, ErrorCode::unsupported)) throw;
    return false;
  }
}

// Each rank reads its own. `listed`: rank 0 sees its file, so it is waited for (fault-rows F24).
void read_own(TrainerState& result, const Location& where, const LoadOptions& options, bool listed,
              Group& group) {
  const auto contribute = [&] {
    if (listed)
      (void)look_until_visible(options.stop, [&] { return sees_own(where, group.rank()); });
    const Found found(where);
    result.state = in_memory(found.state_of(group.rank()), found.name(), options);
    return step_of(*result.state);
  };
  const auto conclude = [](const Bytes&) { return Bytes(); };
  confer(group, kFindingState, {contribute, same_step, conclude});
}

// Rank 0 says what is wrong where this rank sees no checkpoint.
Bytes says_own(const Location& where, const LoadOptions& options, const Group& group) {
  require_going_on(options.stop);
  require_threads(options.threads);
  const bool sees = options.reader == LoadReader::every_rank && sees_own(where, group.rank());
  return {std::byte{sees ? std::uint8_t{1} : std::uint8_t{0}}};
}

Bytes any_sees(const Bytes& left, const Bytes& right) {
  return {left.at(0) | right.at(0)};
}

}  // namespace

TrainerState trainer_state(const Location& where, const LoadOptions& options, Group& group) {
  const Purpose purpose(kFindingState);
  Teller teller(where, options, group.size());
  const Bytes told =
      confer(group, kFindingState,
             {[&] { return says_own(where, options, group); }, any_sees,
              [&](const Bytes& all) { return teller.conclude(all.at(0) != std::byte{0}); }});
  MessageReader message(told);
  const auto answer = message.number<Answer>();
  TrainerState result;
  if (answer == Answer::none) return result;
  if (answer == Answer::own) {
    const bool listed = message.rest()[static_cast<std::size_t>(group.rank())] != std::byte{0};
    read_own(result, where, options, listed, group);
    return result;
  }
  agree(group, kFindingState, [&] {
    const std::string path = to_string(where);
    if (answer == Answer::first) warn_of_other_ranks(result, message.number<std::int32_t>(), group);
    if (answer == Answer::full) warn_of_one_state(result, group);
    const int before = answer == Answer::each ? group.rank() : 0;
    for (int rank = 0; rank < before; ++rank) (void)message.block();
    result.state = teller.take_own();
    if (!result.state) result.state = take_state(message, path, options);
  });
  return result;
}

namespace {

constexpr const char* kPreparing = "preparing to load an optimizer's state";

// Null: the leaf is no part of a tree with keys.
const std::string* top_of(const Leaf& leaf) {
  return leaf.path.empty() ? nullptr : std::get_if<std::string>(&leaf.path.front());
}

[[noreturn]] void throw_without_key(const std::string& key, const Checkpoint& checkpoint) {
  std::set<std::string> tops;
  for (const auto& leaf : checkpoint.leaves) {
    if (const auto* top = top_of(leaf)) tops.insert(*top);
  }
  std::string text = "the checkpoint has nothing under this key; at its top are ";
  for (const auto& top : tops) text += (top == *tops.begin() ? "'" : ", '") + top + "'";
  throw Error(ErrorCode::not_found, tops.empty() ? "the checkpoint has no keys" : text).at_key(key);
}

// Memory for this rank's part of what is stored.
Tensor own_part(const Tensor& stored, const Group& group) {
  Tensor made;
  made.dtype = stored.dtype;
  made.shape = stored.shape;
  made.requires_grad = stored.requires_grad;
  made.sharded = numel(made.shape) != 1;
  const auto box =
      made.sharded ? chunk_of(whole(made.shape), 0, group.size(), group.rank()) : whole(made.shape);
  if (numel(box) > 0)
    made.pieces = {
        {box, fresh_storage(made.dtype, byte_size(made.dtype, box.sizes)), 0, {}, group.rank()}};
  return made;
}

// What `checkpoint` has under the key, with memory in the place of tensors.
Value wanted_tree(const std::string& key, const Checkpoint& checkpoint, const Group& group) {
  std::vector<Leaf> wanted;
  for (const auto& leaf : checkpoint.leaves) {
    const auto* top = top_of(leaf);
    if (top == nullptr || *top != key) continue;
    auto& own = wanted.emplace_back(leaf);
    if (leaf.value.is(Value::Kind::tensor)) own.value = own_part(leaf.value.as_tensor(), group);
  }
  if (wanted.empty()) throw_without_key(key, checkpoint);
  fill_holes(wanted);
  return unflatten(wanted);
}

// `load` is a load from what has these `contents`.
Value loaded_under(const std::string& key, const Checkpoint& contents, const LoadOptions& options,
                   Group& group, const std::function<void(Value& tree)>& load) {
  Value tree;
  agree(group, kPreparing, [&] {
    if (options.rename) {
      throw Error(ErrorCode::invalid_argument, "other names for the keys of a tree that has none");
    }
    tree = wanted_tree(key, contents, group);
  });
  load(tree);
  return tree;
}

}  // namespace

Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                        const Checkpoint& checkpoint, const LoadOptions& options,
                                        Group& group) {
  return loaded_under(optimizer_key, checkpoint, options, group,
                      [&](Value& tree) { load(tree, checkpoint, options, group); });
}

Value load_sharded_optimizer_state_dict(const std::string& optimizer_key, const Location& where,
                                        const LoadOptions& options, Group& group) {
  auto checkpoint = GroupCheckpoint::open(where, options, group);
  return loaded_under(optimizer_key, checkpoint.contents(), options, group,
                      [&](Value& tree) { checkpoint.load(tree, options); });
}

Value load_sharded_optimizer_state_dict(const std::string& optimizer_key, const Location& where,
                                        Group& group) {
  return load_sharded_optimizer_state_dict(optimizer_key, where, {}, group);
}

}  // namespace tessera
