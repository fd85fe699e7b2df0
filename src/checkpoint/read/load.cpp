// Loading by N ranks:
//   1. every rank opens the checkpoint and matches its tree's leaves with it (P-16); all agree;
//   2. every rank reads its own pieces, from whatever layout there is (P-17); all agree.
// Nothing is written into the tree's memory before 1 has succeeded on every rank.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "base/parallel.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "comm/long_work.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::int64_t kWindow =
    1 << 20;  // bytes of elements that are read, converted or scattered at once

// A leaf of the tree and what the checkpoint has for it.
struct Match {
  const Leaf* wanted = nullptr;
  const Leaf* found = nullptr;
};

// One piece of one tensor to fill.
struct Job {
  const Match* match = nullptr;
  std::size_t piece = 0;
};

void require_same_shape(const Leaf& wanted, const Leaf& found, const LoadOptions& options) {
  const bool tensor = wanted.value.is(Value::Kind::tensor);
  if (!tensor) return;  // a value replaces whatever is there, a tensor too when it is one
  if (!found.value.is(Value::Kind::tensor)) {
    throw Error(ErrorCode::mismatch, "the checkpoint has a value here, expected a tensor");
  }
  const Tensor& want = wanted.value.as_tensor();
  const Tensor& have = found.value.as_tensor();
  if (want.shape != have.shape) {
    throw Error(ErrorCode::mismatch, "the checkpoint's shape is " + to_string(have.shape) +
                                         ", expected " + to_string(want.shape));
  }
  if (want.dtype != have.dtype && !(options.allow_cast && can_cast(have.dtype, want.dtype))) {
    throw Error(ErrorCode::mismatch, "the checkpoint's dtype is " +
                                         std::string(to_string(have.dtype)) + ", expected " +
                                         std::string(to_string(want.dtype)));
  }
  for (const Piece& piece : want.pieces) {
    require_inside(piece.slice, want.shape);
    if (numel(piece.slice) > 0 && (!piece.storage || piece.storage->data == nullptr)) {
      throw Error(ErrorCode::invalid_argument, "a piece to load into has no memory");
    }
  }
}

std::vector<Match> match(const std::vector<Leaf>& leaves, const Checkpoint& checkpoint,
                         const LoadOptions& options) {
  std::map<std::string_view, const Leaf*> by_name;
  for (const Leaf& leaf : checkpoint.leaves) by_name.emplace(leaf.name, &leaf);
  std::vector<Match> matches;
  for (const Leaf& leaf : leaves) {
    const auto found = by_name.find(leaf.name);
    if (found == by_name.end()) {
      if (options.allow_missing) continue;
      throw Error(ErrorCode::not_found, "the checkpoint has no such key")
          .at_key(leaf.name)
          .at_path(checkpoint.path);
    }
    try {
      require_same_shape(leaf, *found->second, options);
    } catch (Error& error) {
      throw error.at_key(leaf.name).at_path(checkpoint.path);
    }
    matches.push_back({&leaf, found->second});
  }
  return matches;
}

// The leaves of the tree by the rule that fits the checkpoint: files from before torch 2.4 keep
// containers without tensors in one item (P-11).
std::vector<Leaf> leaves_for(const Value& tree, const Checkpoint& checkpoint) {
  std::set<std::string_view> names;
  for (const Leaf& leaf : checkpoint.leaves) names.insert(leaf.name);
  std::vector<Leaf> current = flatten(tree);
  const bool complete = std::all_of(current.begin(), current.end(),
                                    [&](const Leaf& leaf) { return names.contains(leaf.name); });
  if (complete) return current;
  std::set<std::string_view> known;
  for (const Leaf& leaf : current) known.insert(leaf.name);
  std::vector<Leaf> old = flatten(tree, FlattenRule::before_2_4);
  const bool fits = std::any_of(old.begin(), old.end(), [&](const Leaf& leaf) {
    return names.contains(leaf.name) && !known.contains(leaf.name);
  });
  return fits ? old : current;
}

// What all jobs of one load share.
struct Shared {
  StorageChecks* checks;  // gets what the reads could not check by themselves; null: nobody does
  IoCounters& counters;
  Meter& meter;
};

void fill(const Leaf& found, const Leaf& wanted, const Piece& piece, const Shared& shared) {
  const Tensor& have = found.value.as_tensor();
  const Tensor& want = wanted.value.as_tensor();
  const std::int64_t count = numel(piece.slice);
  if (count == 0) return;
  TensorReader reader(have, found.name);
  const std::size_t element = size_of(want.dtype);
  const Shape sizes =
      std::holds_alternative<Box>(piece.slice) ? std::get<Box>(piece.slice).sizes : Shape{count};
  const Shape strides = piece.strides.empty() ? contiguous_strides(sizes) : piece.strides;
  std::byte* const first =
      piece.storage->data + static_cast<std::size_t>(piece.storage_offset) * element;
  const std::int64_t step =
      kWindow / static_cast<std::int64_t>(std::max(element, size_of(have.dtype)));
  if (want.dtype == have.dtype && strides == contiguous_strides(sizes)) {
    for (std::int64_t begin = 0; begin < count; begin += step) {
      const std::int64_t part = std::min(step, count - begin);
      reader.read(piece.slice, begin, part, first + static_cast<std::size_t>(begin) * element);
      shared.meter.add(static_cast<std::uint64_t>(part) * element);
    }
  } else {
    std::vector<std::byte> raw(static_cast<std::size_t>(step) * size_of(have.dtype));
    std::vector<std::byte> converted(static_cast<std::size_t>(step) * element);
    for (std::int64_t begin = 0; begin < count; begin += step) {
      const std::int64_t part = std::min(step, count - begin);
      reader.read(piece.slice, begin, part, raw.data());
      cast(have.dtype, raw.data(), want.dtype, converted.data(), part);
      const std::byte* from = converted.data();
      for_each_strided_run(
          sizes, strides, begin, part, [&](std::int64_t position, std::int64_t run) {
            const std::size_t bytes = static_cast<std::size_t>(run) * element;
            std::memcpy(first + static_cast<std::size_t>(position) * element, from, bytes);
            from += bytes;
          });
      shared.meter.add(static_cast<std::uint64_t>(part) * element);
    }
  }
  if (shared.checks != nullptr) reader.hand_over(*shared.checks);
  shared.counters.add(reader.report());
}

// Replaces the leaf at `path` of `tree`.
void assign(Value& tree, const Path& path, const Value& value) {
  Value at = tree;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) {
    if (const auto* key = std::get_if<std::string>(&path[i])) {
      at = at.at(*key);
    } else {
      at = at.items().at(static_cast<std::size_t>(std::get<std::int64_t>(path[i])));
    }
  }
  if (const auto* key = std::get_if<std::string>(&path.back())) {
    at.set_item(Value(*key), value);
  } else {
    at.items().at(static_cast<std::size_t>(std::get<std::int64_t>(path.back()))) = value;
  }
}

// Bytes of the pieces that are to be filled.
std::uint64_t wanted_bytes(const std::vector<Match>& matches) {
  std::uint64_t bytes = 0;
  for (const Match& match : matches) {
    if (!match.wanted->value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = match.wanted->value.as_tensor();
    for (const Piece& piece : tensor.pieces)
      bytes += static_cast<std::uint64_t>(numel(piece.slice)) * size_of(tensor.dtype);
  }
  return bytes;
}

void read_tensors(const std::vector<Match>& matches, int threads, const Shared& shared) {
  std::vector<Job> jobs;
  for (const Match& match : matches) {
    if (!match.wanted->value.is(Value::Kind::tensor)) continue;
    for (std::size_t p = 0; p < match.wanted->value.as_tensor().pieces.size(); ++p) {
      jobs.push_back({&match, p});
    }
  }
  parallel_for(threads, jobs.size(), [&](std::size_t i) {
    const Match& match = *jobs[i].match;
    fill(*match.found, *match.wanted, match.wanted->value.as_tensor().pieces[jobs[i].piece],
         shared);
  });
}

// `tree` with other values in the place of some of its nodes; containers on the way are new ones of
// the same kind, keys and attributes.
Value replaced(const Value& tree, const std::unordered_map<const void*, Value>& by) {
  if (const auto found = by.find(tree.identity()); found != by.end()) return found->second;
  if (tree.is(Value::Kind::list)) {
    Value::List items;
    for (const auto& item : tree.items()) items.push_back(replaced(item, by));
    return Value::list(std::move(items));
  }
  if (!tree.is(Value::Kind::dict)) return tree;
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : tree.pairs()) pairs.emplace_back(key, replaced(value, by));
  auto made = Value::dict(std::move(pairs), tree.dict_kind());
  if (const auto* state = tree.container_state()) made.set_container_state(*state);
  if (const auto* factory = tree.default_factory()) made.set_default_factory(*factory);
  return made;
}

}  // namespace

IoReport load(Value& tree, const std::string& path, Group& group, const LoadOptions& options) {
  Checkpoint checkpoint;
  std::vector<Leaf> leaves;
  std::vector<Match> matches;
  agree(group, "opening a checkpoint", [&] {
    require_going_on(options.stop);
    checkpoint = open_checkpoint(path);
    leaves = leaves_for(tree, checkpoint);
    matches = match(leaves, checkpoint, options);
  });
  IoCounters counters;
  std::optional<Meter> meter;
  const auto read = [&](const std::stop_token& stop) {
    meter.emplace(options.progress, wanted_bytes(matches), stop);
    read_tensors(matches, options.threads, {nullptr, counters, *meter});
  };
  agree_on_long_work(group, "reading a checkpoint", options.stop, read);
  for (const Match& match : matches) {
    if (!match.wanted->value.is(Value::Kind::tensor))
      assign(tree, match.wanted->path, match.found->value);
  }
  meter->finish();
  return counters.report();
}

Value load_all(const Checkpoint& checkpoint, const LoadOptions& options) {
  std::vector<Leaf> leaves = checkpoint.leaves;
  for (Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    Tensor tensor = leaf.value.as_tensor();
    require_bounded(tensor, leaf.name);
    const std::size_t bytes = byte_size(tensor.dtype, tensor.shape);
    auto storage = std::make_shared<Storage>();
    storage->owner = std::shared_ptr<void>(std::malloc(std::max<std::size_t>(bytes, 1)), std::free);
    if (!storage->owner)
      throw Error(ErrorCode::limit, "no memory for " + std::to_string(bytes) + " bytes");
    storage->data = static_cast<std::byte*>(storage->owner.get());
    storage->size = bytes;
    storage->dtype = tensor.dtype;
    tensor.pieces = {Piece{whole(tensor.shape), std::move(storage), 0, {}, -1}};
    leaf.value = Value(std::move(tensor));
  }
  IoCounters counters;
  StorageChecks checks;
  Meter meter(options.progress, tensor_bytes(leaves), options.stop);
  read_tensors(match(leaves, checkpoint, options), options.threads, {&checks, counters, meter});
  checks.read_rest(options.threads, options.stop);
  meter.finish();
  if (checkpoint.root) {
    std::unordered_map<const void*, Value> loaded;
    for (std::size_t i = 0; i < leaves.size(); ++i)
      loaded.emplace(checkpoint.leaves[i].value.identity(), leaves[i].value);
    return replaced(*checkpoint.root, loaded);
  }
  try {
    return unflatten(leaves);
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
}

}  // namespace tessera
