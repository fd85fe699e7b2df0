// What the ranks of a save tell each other: how it begins, and what they wrote.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/save/place.h"
#include "checkpoint/save/planned_leaf.h"
#include "checkpoint/save/save_plan.h"
#include "comm/message.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// How a save begins: ranks find out whether they are about to save the same, and rank 0 says how it
// is done.

// What a rank is about to save.
struct Intent {
  std::uint64_t leaves = 0;  // a digest of all that is planned for its leaves
  std::uint64_t values = 0;  // and of all values
  bool tells = false;        // some parts are not to be computed by others
};
auto fields(FieldsOf<Intent> auto& intent) {
  return std::tie(intent.leaves, intent.values, intent.tells);
}
[[nodiscard]] std::uint64_t digest_of(const std::vector<PlannedLeaf>& leaves);

// The intents of several ranks, joined.
struct Intents {
  Intent first;
  bool same_leaves = true;
  bool same_values = true;
  Unseeing unseeing;
};
auto fields(FieldsOf<Intents> auto& intents) {
  return std::tie(intents.first, intents.same_leaves, intents.same_values, intents.unseeing);
}
void join_intents(Intents& all, const Intents& more);

constexpr IfDiffers last_of(IfDiffers) {
  return IfDiffers::keep;
}
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
auto fields(FieldsOf<Opening> auto& opening) {
  return std::tie(opening.save_id, opening.attempt, opening.rules, opening.tells,
                  opening.compare_values, opening.keep_values, opening.copies,
                  opening.is_seen_late);
}

// What ranks report of the data files that they wrote, and what rank 0 makes of it.

struct FileReport {
  int file = 0;  // number of the rank's file
  DataDigest digest;
  std::uint64_t items = 0;  // that are compressed
};
struct RankReport {
  int rank = 0;
  std::string host;
  std::vector<FileReport> files;
  // The lengths of compressed items, in the order of `files` and in each.
  std::vector<std::uint64_t> lengths = {};
};
// The reports of all ranks, and the sum of their copies_term().
struct Reports {
  std::uint64_t copies = 0;
  std::vector<RankReport> ranks;
};

// As messages that combine. `are_compressed`: they have the lengths of items.
[[nodiscard]] Bytes encode_report(const RankReport& report, std::uint64_t copies,
                                  bool are_compressed = false);
[[nodiscard]] Bytes combine_reports(Bytes left, const Bytes& right);
[[nodiscard]] Reports decode_reports(const Bytes& message, bool are_compressed = false);

// Throws `mismatch` for a file that is not planned, and one that is planned and nobody wrote; for a
// size that is not the planned one, or of compressed files does not follow from the lengths of as
// many items as planned.
void require_planned(const Reports& reports, const SavePlan& plan, const std::string& attempt);
// Each file that is reported (place.h).
struct Listed {
  const Store& store;
  const std::vector<ObjectInfo>& objects;  // of its root
};
void require_in_store(const Reports& reports, const Listed& there, const std::string& attempt,
                      const Looking& looking);

[[nodiscard]] DigestsByName digests_of(const Reports& reports, const std::string& attempt);

}  // namespace tessera
