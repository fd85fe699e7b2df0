// What the ends of all ranks mean.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "generated/run.h"

namespace tessera::generated {
namespace {

using Kind = Outcome::Kind;

std::string at_rank(std::size_t rank, const std::string& text) {
  return "rank " + std::to_string(rank) + ": " + text;
}

// The first one of a kind; empty: none.
std::string first_of(const std::vector<Outcome>& outcomes, Kind kind) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].kind == kind) return at_rank(rank, outcomes[rank].text);
  }
  return {};
}

// Says who or what it was.
bool names_cause(const std::string& text) {
  const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
  return has("unit '") || has("rank ") || has("step ") || has("block") || has("unit of");
}

// Refused for what PyTorch's flat parameters cannot hold either: a state of some of the parameters
// in one, said in its words, or different numbers of steps, said by the loading of checkpoints.
// Gradients of gradients need parameters that are sharded by then, and an activation checkpoint has
// none, nor those of inputs alone. Complex numbers are no flat parameter (the words are PyTorch's).
bool is_refused(const Outcome& outcome) {
  const auto has = [&](const char* part) { return outcome.text.find(part) != std::string::npos; };
  return has("comprising a single flat parameter must have") ||
         has("Cannot flatten integer dtype tensors") || has("used while they are sharded") ||
         has("gradients of gradients (create_graph") || has("went through a checkpointed part") ||
         (has("are not in the checkpoint: 'optim.state.") && has("planning a load")) ||
         (has("one memory for two keys") && has(".step'"));
}

double largest_loss(const std::vector<PhaseResult>& phases) {
  double largest = 0;
  for (const auto& phase : phases) {
    for (const auto& step : phase) {
      for (const double loss : step.losses) largest = std::max(largest, std::abs(loss));
    }
  }
  return largest;
}

Verdict verdict_if_alike(const std::vector<Outcome>& outcomes) {
  if (std::ranges::all_of(outcomes, is_refused)) return {{}, "refused"};
  // What one rank saw is the cause of what others say of it.
  for (const auto kind : {Kind::differs, Kind::other_exception, Kind::failed_as_meant}) {
    if (auto text = first_of(outcomes, kind); !text.empty()) return {text, {}};
  }
  std::string lost;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].kind != Kind::error) continue;
    const auto& text = outcomes[rank].text;
    if (!text.starts_with("peer_failed") && !text.starts_with("timeout"))
      return {at_rank(rank, text), {}};
    if (lost.empty()) lost = at_rank(rank, text);
  }
  return {lost, {}};
}

Verdict verdict_if_odd(const Case& drawn, const std::vector<Outcome>& outcomes) {
  if (auto text = first_of(outcomes, Kind::differs); !text.empty())
    return {"other numbers instead of an error: " + text, {}};
  const auto finished = std::ranges::count(outcomes, Kind::finished, &Outcome::kind);
  if (finished == static_cast<std::ptrdiff_t>(outcomes.size())) return {{}, "equal"};
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const auto& [kind, text] = outcomes[rank];
    const bool is_odd = static_cast<int>(rank) == drawn.odd_rank;
    if (kind == Kind::finished)
      return {"rank " + std::to_string(rank) + " finished: " + verdict_if_alike(outcomes).failure,
              {}};
    if (kind == Kind::other_exception) return {"no Error: " + at_rank(rank, text), {}};
    if (!is_odd && kind != Kind::error) return {"no Error: " + at_rank(rank, text), {}};
    if (kind == Kind::error && !names_cause(text))
      return {"the error names nothing: " + at_rank(rank, text), {}};
  }
  return {{}, "error"};
}

// How far the losses and parameters of two runs are apart, relative to the largest value, at
// least 1.
double distance(const std::vector<PhaseResult>& a, const std::vector<PhaseResult>& b) {
  double farthest = 0;
  const auto add = [&](double difference, double largest) {
    // What is no number any more is as far as can be.
    const auto apart = difference / std::max(1.0, largest);
    farthest = apart <= farthest ? farthest : std::isnan(apart) ? 1e300 : apart;
  };
  for (std::size_t p = 0; p < a.size(); ++p) {
    for (std::size_t s = 0; s < a[p].size(); ++s) {
      const auto &one = a[p][s], &other = b[p][s];
      for (std::size_t i = 0; i < one.losses.size(); ++i)
        add(std::abs(one.losses[i] - other.losses[i]), std::abs(one.losses[i]));
      for (const auto& [name, values] : one.parameters) {
        if (values.numel() == 0) continue;
        add((values - other.parameters.at(name)).abs().max().item<double>(),
            values.abs().max().item<double>());
      }
    }
  }
  return farthest;
}

// Whether one process, too, makes much of a last digit: of what has no other precision to be
// compared in.
bool is_unstable(const Case& drawn) {
  const double much = is_low(drawn.precision) ? 2e-2 : 1e-3;
  auto nudged = drawn;
  nudged.nudged = true;
  return distance(run_plain(drawn), run_plain(nudged)) > much;
}

// Whether more digits make a difference go away: norms can make much of a last one, and trainings
// whose losses explode anything of one of bf16.
template <typename Run>
bool is_rounding(const Case& drawn, const Run& run) {
  constexpr double kExploded = 1000;
  const auto holds = [&](const Case& other, const char* name) {
    return verdict_if_alike(run(other, name)).failure.empty();
  };
  if (drawn.autocast || std::ranges::any_of(drawn.blocks, has_complex)) return is_unstable(drawn);
  auto rough = drawn, exact = drawn;
  if (is_low(drawn.precision)) {
    exact.precision = Precision::fp32;
    return largest_loss(run_plain(drawn)) > kExploded &&
           (holds(exact, "exact") || is_unstable(drawn));
  }
  rough.rough = true;
  exact.precision = Precision::fp64;
  return drawn.precision == Precision::fp32 && holds(rough, "rough") && holds(exact, "exact");
}

}  // namespace

Verdict verdict_of(const Case& drawn, const std::string& directory) {
  constexpr auto kLimit = std::chrono::seconds(20);
  at::set_num_threads(1);
  const auto begin = std::chrono::steady_clock::now();
  // Each in a directory of its own: a checkpoint that is there already is refused.
  const auto run = [&](const Case& one, const char* name) {
    return run_sharded(one, run_plain(one), directory + "/" + name);
  };
  const auto outcomes = run(drawn, "drawn");
  if (drawn.odd == Odd::nothing) {
    const bool differs = !first_of(outcomes, Kind::differs).empty();
    return differs && is_rounding(drawn, run) ? Verdict{{}, "rounding"}
                                              : verdict_if_alike(outcomes);
  }
  if (std::chrono::steady_clock::now() - begin > kLimit)
    return {"took longer than " + std::to_string(kLimit.count()) + " s", {}};
  return verdict_if_odd(drawn, outcomes);
}

}  // namespace tessera::generated
