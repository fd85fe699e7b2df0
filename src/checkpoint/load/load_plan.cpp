#include "checkpoint/load/load_plan.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/digest.h"
#include "base/numbers.h"
#include "checkpoint/load/fill.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/missing.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::size_t kMostNamed = 100;
constexpr std::size_t kLongestKey = 200;  // bytes

struct Difference {
  std::string key;
  ErrorCode code;
  std::string reason;  // empty: there is no more to say
};

// Differences of one sort, and what is said of them.
struct Sort {
  std::string alone;         // what is said of the only one; empty: its reason
  std::string one, several;  // "1 key ...", "2 keys ..."
  std::vector<Difference> differences;
};

// Its keys, as long as `left` lasts.
std::string text_of(const Sort& sort, std::size_t& left) {
  const std::size_t count = sort.differences.size();
  const std::size_t named = std::min(count, std::exchange(left, left - std::min(left, count)));
  std::string text = std::to_string(count) + (count == 1 ? sort.one : sort.several);
  for (std::size_t i = 0; i < named; ++i) {
    const Difference& difference = sort.differences[i];
    text += (i == 0 ? ": '" : ", '") + printable(difference.key, kLongestKey) + "'";
    if (!difference.reason.empty()) text += " (" + difference.reason + ")";
  }
  if (named > 0 && named < count) text += ", and " + std::to_string(count - named) + " more";
  return text;
}

ErrorCode shared_code(const std::vector<Sort>& sorts) {
  const ErrorCode first = sorts.front().differences.front().code;
  const bool shared = std::ranges::all_of(sorts, [first](const Sort& sort) {
    return std::ranges::all_of(sort.differences, [first](const Difference& difference) {
      return difference.code == first;
    });
  });
  return shared ? first : ErrorCode::mismatch;
}

std::string text_of(const std::vector<Sort>& sorts) {
  const Sort& first = sorts.front();
  if (sorts.size() == 1 && first.differences.size() == 1) {
    const std::string& reason = first.differences.front().reason;
    if (first.alone.empty()) return reason;
    return reason.empty() ? first.alone : first.alone + " (" + reason + ")";
  }
  std::size_t left = kMostNamed;
  std::string text;
  for (const Sort& sort : sorts) {
    if (!text.empty()) text += "; ";
    text += text_of(sort, left);
  }
  return text;
}

std::string_view last_step(std::string_view key) {
  return key.substr(key.rfind('.') + 1);
}

// The one of `keys` with the longest end in common with `key`, of its whole last step at least;
// empty: none.
std::string_view nearest(std::string_view key, const std::vector<std::string>& keys) {
  std::string_view found;
  std::ptrdiff_t longest = 0;
  for (const std::string& other : keys) {
    if (last_step(other) != last_step(key)) continue;
    const auto end = std::ranges::mismatch(key.rbegin(), key.rend(), other.rbegin(), other.rend());
    const std::ptrdiff_t shared = end.in1 - key.rbegin();
    if (shared > longest) {
      longest = shared;
      found = other;
    }
  }
  return found;
}

// What else is known of a missing key.
std::string sought_text(const std::string& key, const std::string& sought,
                        const std::vector<std::string>& left) {
  const auto quoted = [](std::string_view text) {
    return "'" + printable(text, kLongestKey) + "'";
  };
  std::string text = key == sought ? "" : "sought as " + quoted(sought);
  if (const std::string_view near = nearest(sought, left); !near.empty())
    text += (text.empty() ? "it has " : ", it has ") + quoted(near);
  return text;
}

}  // namespace

void Differences::add_missing(std::string key, std::string sought) {
  missing_.push_back({std::move(key), std::move(sought)});
}

void Differences::add_unfit(std::string key, const Error& why) {
  unfit_.push_back({std::move(key), why.code(), why.message()});
}

std::optional<Error> Differences::refusal(const LoadOptions& options) const {
  std::vector<Sort> sorts;
  if (options.missing == OnDifference::refuse) {
    sorts.push_back({"the checkpoint has no such key",
                     " key is not in the checkpoint",
                     " keys are not in the checkpoint",
                     {}});
    const std::vector<std::string> none;
    const auto& others = missing_.size() <= kMostNamed ? left_ : none;  // each with each
    for (const Missing& missing : missing_) {
      sorts.back().differences.push_back(
          {missing.key, ErrorCode::not_found, sought_text(missing.key, missing.sought, others)});
    }
  }
  if (options.unfit == OnDifference::refuse) {
    sorts.push_back({"", " key does not fit", " keys do not fit", {}});
    for (const Unfit& unfit : unfit_)
      sorts.back().differences.push_back({unfit.key, unfit.code, unfit.reason});
  }
  if (options.extra == OnDifference::refuse) {
    sorts.push_back({"the checkpoint has this key, the tree does not",
                     " key is in the checkpoint alone",
                     " keys are in the checkpoint alone",
                     {}});
    for (const std::string& key : extra_)
      sorts.back().differences.push_back({key, ErrorCode::mismatch, ""});
  }
  std::erase_if(sorts, [](const Sort& sort) { return sort.differences.empty(); });
  if (sorts.empty()) return std::nullopt;
  for (Sort& sort : sorts) std::ranges::sort(sort.differences, {}, &Difference::key);
  return Error(shared_code(sorts), text_of(sorts)).at_key(sorts.front().differences.front().key);
}

void Differences::fill(LoadReport& report) const {
  for (const Missing& missing : missing_) report.missing.push_back(missing.key);
  std::ranges::sort(report.missing);
  for (const Unfit& unfit : unfit_) report.unfit.push_back({unfit.key, unfit.reason});
  std::ranges::sort(report.unfit, {}, &UnfitKey::key);
  report.extra = extra_;
  std::ranges::sort(report.extra);
}

// The message: 1 byte of flags; unless the names differ, a digest of the leaves' names (8 bytes)
// and, unless all leaves are taken, a bit a leaf, set where it is not taken.

namespace {

constexpr std::byte kRefused{1};      // by some rank
constexpr std::byte kNamesDiffer{2};  // between ranks
constexpr std::size_t kDigestEnd = 9;

std::uint64_t digest_of_names(const std::vector<Leaf>& leaves) {
  RunningDigest digest;
  for (const Leaf& leaf : leaves) {
    // With the final zero, which parts one name from the next.
    digest.add(std::as_bytes(std::span(leaf.name.c_str(), leaf.name.size() + 1)));
  }
  return digest.value();
}

std::byte bit(std::size_t leaf) {
  return std::byte{1} << static_cast<int>(leaf % 8);
}

bool same_names(const Bytes& a, const Bytes& b) {
  return a.size() > 1 && b.size() > 1 &&
         std::equal(a.begin() + 1, a.begin() + kDigestEnd, b.begin() + 1);
}

}  // namespace

Bytes untaken_message(const std::vector<Leaf>& leaves, const std::vector<std::size_t>& untaken,
                      bool refused) {
  Bytes message = {refused ? kRefused : std::byte{0}};
  append_le(message, digest_of_names(leaves));
  if (untaken.empty()) return message;
  message.resize(kDigestEnd + (leaves.size() + 7) / 8);
  for (const std::size_t leaf : untaken) message[kDigestEnd + leaf / 8] |= bit(leaf);
  return message;
}

Bytes combine_untaken(Bytes left, Bytes right) {
  const std::byte flags = left.front() | right.front();
  if (!same_names(left, right)) return {flags | kNamesDiffer};
  left.front() = flags;
  left.resize(std::min(left.size(), right.size()));
  for (std::size_t i = kDigestEnd; i < left.size(); ++i) left[i] &= right[i];
  return left;
}

std::vector<std::size_t> untaken_by_all(const Bytes& message, std::vector<std::size_t> untaken) {
  if (names_differ(message)) return untaken;
  if (message.size() == kDigestEnd) return {};
  std::erase_if(untaken, [&message](std::size_t leaf) {
    return (message[kDigestEnd + leaf / 8] & bit(leaf)) == std::byte{0};
  });
  return untaken;
}

bool names_differ(const Bytes& message) {
  return (message.front() & kNamesDiffer) != std::byte{0};
}

bool any_refuses(const Bytes& message) {
  return (message.front() & kRefused) != std::byte{0};
}

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
        lacks_files_(lacks_files(checkpoint_)),
        fresh_(checkpoint_.leaves, false),
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
    // Of a tensor it has to be known what is wanted of it.
    if (lacks_files_ && !found->value.is(Value::Kind::tensor)) require_here(*found);
    if (!wanted.value.is(Value::Kind::tensor)) {
      source_.want(leaf);
      if (lacks_files_) require_here(*found);
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
      if (lacks_files_) require_here(tensor, found->value.as_tensor());
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
      if (lacks_files_ && !checkpoint_.leaves[i].value.is(Value::Kind::tensor))
        require_here(checkpoint_.leaves[i]);
      source_.want(i);
      if (lacks_files_) require_here(checkpoint_.leaves[i]);
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
  const bool lacks_files_;
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
