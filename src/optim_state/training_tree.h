// The tree that a TrainingState is in a checkpoint: which part stands where.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/leaf.h"
#include "tessera/training_state.h"

namespace tessera::detail {

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kRankValues = "rank_values";
constexpr const char* kTrain = "train";  // a value of OLMo's kinds

// A state, and the path of the dict that holds it.
template <typename State>
struct Placed {
  State& state;
  Path place;
};

// The state, and after it the others below it. Throws `invalid_argument` for one of those without a
// key.
[[nodiscard]] std::vector<Placed<const TrainingState>> placed(const TrainingState& state);
[[nodiscard]] std::vector<Placed<TrainingState>> placed(TrainingState& state);

[[nodiscard]] Path below(Path place, PathPart step);

// `error`, the key of which is one of the state at `place`.
[[nodiscard]] Error moved_below(const Path& place, const Error& error);

// work(). What it throws names its key from the top of the tree: which state it is of.
template <typename Work>
decltype(auto) named_from_top(const Path& place, Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const Error& error) {
    if (place.empty() || !error.peers().empty()) throw;
    throw moved_below(place, error);
  }
}

// The dict of one state. `optim`: of the optimizer, if there is one; `ranks`: what belongs to
// single ones. Throws `invalid_argument` for values under a key of the state's own.
[[nodiscard]] Value tree_of(const TrainingState& state, const Value& model,
                            std::optional<Value> optim, std::optional<Value> ranks);

// Puts `part` at `place` in `tree`, a dict that has what leads there. Throws `invalid_argument` if
// something is there.
void put(Value& tree, const Path& place, Value part);
[[nodiscard]] Value& at(Value& tree, const Path& place);

// The key of a rank's own values.
[[nodiscard]] std::string key_of(int rank);

// The whole tree of what this rank saves of `state` and the others.
[[nodiscard]] Value tree_to_save(const TrainingState& state, int rank);

}  // namespace tessera::detail
