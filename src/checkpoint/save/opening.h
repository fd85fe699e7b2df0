// How a save begins: ranks find out whether they are about to save the same, and rank 0 says how it
// is done.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/save/planned_leaf.h"
#include "checkpoint/save/probe.h"
#include "checkpoint/save/save_plan.h"
#include "tessera/checkpoint.h"

namespace tessera {

// What a rank is about to save.
struct Intent {
  std::uint64_t leaves = 0;  // a digest of all that is planned for its leaves
  std::uint64_t values = 0;  // and of all values
  bool tells = false;        // some parts are not to be computed by others
};
[[nodiscard]] std::uint64_t digest_of(const std::vector<PlannedLeaf>& leaves);

// Of several ranks.
struct Intents {
  Intent first;
  bool same_leaves = true;
  bool same_values = true;
  Unseeing unseeing;
};
[[nodiscard]] Bytes encode_intents(const Intents& intents);
[[nodiscard]] Intents decode_intents(const Bytes& message);
[[nodiscard]] Bytes combine_intents(const Bytes& left, const Bytes& right);

// What rank 0 says.
struct Opening {
  std::string save_id;
  std::string attempt;  // part of every data file's name
  PlanRules rules;
  bool tells = false;           // ranks tell what they hold
  bool compare_values = false;  // they are not all the same
  bool keep_values = false;     // those that differ are saved, too: all is told then
  IfDiffers copies = IfDiffers::warn;
  bool is_seen_late = false;  // some ranks have to wait until they see rank 0's probe
};
[[nodiscard]] Bytes encode_opening(const Opening& opening);
[[nodiscard]] Opening decode_opening(const Bytes& message);

}  // namespace tessera
