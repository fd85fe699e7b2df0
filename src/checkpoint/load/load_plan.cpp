#include "checkpoint/load/load_plan.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

#include "checkpoint/load/fresh.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/read/castable.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/tree/tree.h"
#include "tessera/error.h"

namespace tessera {
namespace {

void require_match(const Tensor& want, const Value& found, const LoadOptions& options) {
  if (!found.is(Value::Kind::tensor)) {
    throw Error(ErrorCode::mismatch, "the checkpoint has a value here, expected a tensor");
  }
  const Tensor& have = found.as_tensor();
  if (want.shape != have.shape) {
    throw Error(ErrorCode::mismatch, "the checkpoint's shape is " + to_string(have.shape) +
                                         ", expected " + to_string(want.shape));
  }
  require_castable(have.dtype, want.dtype, options.allow_cast, options.allow_wrap);
}

// Why a tensor of the tree cannot take what the checkpoint has; none: it can.
std::optional<Error> misfit(const Tensor& want, const Value& found, const LoadOptions& options) {
  try {
    require_match(want, found, options);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// The checkpoint's key for one of the tree.
std::string sought(const std::string& key, const LoadOptions& options) {
  return options.rename ? options.rename(key) : key;
}

std::set<std::string_view> names_of(const std::vector<Leaf>& leaves) {
  std::set<std::string_view> names;
  for (const Leaf& leaf : leaves) names.insert(leaf.name);
  return names;
}

// The leaves of the tree by the rule that fits the checkpoint: files from before torch 2.4 keep
// containers without tensors in one item (checkpoint-rows P-11).
std::vector<Leaf> leaves_for(const Value& tree, const Checkpoint& checkpoint,
                             const LoadOptions& options) {
  const std::set<std::string_view> names = names_of(checkpoint.leaves);
  const auto there = [&](const Leaf& leaf) {
    const std::string key = sought(leaf.name, options);
    if (names.contains(key)) return true;
    if (!leaf.value.is(Value::Kind::none)) return false;
    const auto below = names.lower_bound(key + ".");  // all of which it takes
    return below != names.end() && below->starts_with(key + ".");
  };
  std::vector<Leaf> current = flatten(tree);
  if (std::ranges::all_of(current, there)) return current;
  const std::set<std::string_view> known = names_of(current);
  std::vector<Leaf> old = flatten(tree, FlattenRule::before_2_4);
  const bool fits = std::ranges::any_of(
      old, [&](const Leaf& leaf) { return there(leaf) && !known.contains(leaf.name); });
  return fits ? old : current;
}

bool holds_nothing(const Value& value) {
  return value.is(Value::Kind::dict) && value.size() == 0;
}

class Planner {
 public:
  Planner(LoadSource& source, const LoadOptions& options)
      : source_(source),
        checkpoint_(source.checkpoint()),
        options_(options),
        fresh_(checkpoint_.leaves),
        taken_(checkpoint_.leaves.size(), false) {}

  void add(const Leaf& wanted) {
    const std::string key = sought(wanted.name, options_);
    const Leaf* const found = checkpoint_.find(key);
    if (found == nullptr) {
      if (is_elsewhere(wanted) || add_below(wanted)) return;
      plan_.differences.add_missing(wanted.name, key);
      return;
    }
    const auto leaf = static_cast<std::size_t>(found - checkpoint_.leaves.data());
    taken_[leaf] = true;
    if (!wanted.value.is(Value::Kind::tensor)) {
      source_.want(leaf);
      plan_.values.emplace_back(wanted.path, fresh_.of(found->value));
      return;
    }
    const Tensor& tensor = wanted.value.as_tensor();
    require_writable(tensor, wanted.name);
    if (const std::optional<Error> why = misfit(tensor, found->value, options_)) {
      plan_.differences.add_unfit(wanted.name, *why);
    } else {
      if (source_.is_own()) require_held(tensor, found->value.as_tensor());
      source_.want(leaf, tensor);
      plan_.fillings.push_back({wanted.name, wanted.value, found->value});
    }
  }

  LoadPlan finish() {
    for (Filling& filling : fresh_.take()) plan_.fillings.push_back(std::move(filling));
    for (std::size_t i = 0; i < taken_.size(); ++i) {
      if (!taken_[i] && !holds_nothing(checkpoint_.leaves[i].value)) plan_.untaken.push_back(i);
    }
    return std::move(plan_);
  }

 private:
  // Whether only the files of other ranks may have it, who have its elements too.
  [[nodiscard]] bool is_elsewhere(const Leaf& wanted) const {
    return source_.is_own() && wanted.value.is(Value::Kind::tensor) &&
           wants_nothing(wanted.value.as_tensor());
  }

  // A none takes whatever there is: all that lies below its key, too. False: nothing does.
  bool add_below(const Leaf& wanted) {
    if (!wanted.value.is(Value::Kind::none) || options_.rename) return false;
    std::vector<Leaf> below;
    for (const std::size_t i : leaves_below(checkpoint_, wanted.path)) {
      taken_[i] = true;
      source_.want(i);
      below.push_back(part_of(checkpoint_.leaves[i], wanted.path.size()));
      below.back().value = fresh_.of(below.back().value);
    }
    if (below.empty()) return false;
    plan_.values.emplace_back(wanted.path, unflatten(below));
    return true;
  }

  LoadSource& source_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  FreshMemory fresh_;
  std::vector<bool> taken_;
  LoadPlan plan_;
};

}  // namespace

LoadPlan plan_load(const Value& tree, LoadSource& source, const LoadOptions& options) {
  const Checkpoint& checkpoint = source.checkpoint();
  Planner planner(source, options);
  for (const Leaf& leaf : leaves_for(tree, checkpoint, options)) {
    try {
      planner.add(leaf);
    } catch (Error& error) {
      throw error.at_key(leaf.name).at_path(checkpoint.path);
    }
  }
  return planner.finish();
}

}  // namespace tessera
