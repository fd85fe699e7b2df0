#include "checkpointer/trainer_file.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/one_of.h"
#include "tessera/error.h"
#include "tessera/random_state.h"

namespace tessera::detail {
namespace {

constexpr const char* kRandom = "rng";

std::string rank_file(CheckpointerKind kind, int rank) {
  const auto file = "rank" + std::to_string(rank) + ".pt";
  return kind == CheckpointerKind::torch_legacy ? file : "train/" + file;
}

// A dict that torch.save wrote, without the model and the optimizer that may lie beside.
Value read_state(const Location& file) {
  const auto of_trainer = [](Leaf leaf) -> std::optional<Leaf> {
    const auto* first = leaf.path.empty() ? nullptr : std::get_if<std::string>(&leaf.path[0]);
    if (first != nullptr && is_one_of(*first, "model", "optim")) return std::nullopt;
    return leaf;
  };
  const auto opened = Checkpoint::open(file);
  if (opened.leaves.empty()) return Value::dict();
  const auto others = opened.map(of_trainer);
  return others.leaves.empty() ? Value::dict() : others.load();
}

std::optional<Value> find_state(const Location& file) {
  try {
    return read_state(file);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return std::nullopt;
    throw;
  }
}

Value require_state(const Location& where, const std::string& name) {
  if (auto state = find_state(inside(where, name))) return std::move(*state);
  throw Error(ErrorCode::incomplete, "the trainer state is missing: there is no " + name)
      .at_path(to_string(where));
}

TrainerState of_full(const Location& where, int rank, int world) {
  auto state = find_state(inside(where, "train.pt"));
  if (!state) state = find_state(inside(where, "other.pt"));  // an older name
  if (!state) state = require_state(where, "train.pt");
  TrainerState found{.state = std::move(*state), .warning = {}};
  const Value* random = found.state.find(kRandom);
  if (world == 1 || random == nullptr) return found;
  found.warning =
      "a `full` checkpoint has the random state of rank 0 alone: other ranks get seeds that are "
      "derived from it";
  found.state.set_item(kRandom, derived_random_state(*random, rank));
  return found;
}

}  // namespace

Location inside(const Location& where, const std::string& name) {
  if (!where.store) return where.path + "/" + name;
  return {where.store, where.name.empty() ? name : where.name + "/" + name};
}

TrainerState trainer_state_in(const Location& where, CheckpointerKind kind, int saved_by, int rank,
                              int world) {
  if (kind == CheckpointerKind::full) return of_full(where, rank, world);
  if (saved_by == world)
    return {.state = require_state(where, rank_file(kind, rank)), .warning = {}};
  TrainerState found{.state = require_state(where, rank_file(kind, 0)), .warning = {}};
  found.state.erase(kRandom);
  found.warning = "the checkpoint is of " + std::to_string(saved_by) + " ranks, these are " +
                  std::to_string(world) +
                  ": all get the trainer state of rank 0, without its random state";
  return found;
}

}  // namespace tessera::detail
