// What ranks report of the data files that they wrote, and what rank 0 makes of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/digests/side_file.h"
#include "checkpoint/digests/tail.h"
#include "checkpoint/save/data_in_store.h"
#include "checkpoint/save/save_plan.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

struct FileReport {
  int file = 0;  // number of the rank's file
  DataDigest digest;
  std::uint64_t items = 0;  // that are compressed
};
struct RankReport {
  int rank = 0;
  std::string host;
  std::vector<FileReport> files;
  // Of compressed items, in the order of `files` and in each.
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
// Each file that is reported (data_in_store.h).
void require_in_store(const Reports& reports, const Store& store, const std::string& attempt,
                      const Looking& looking);

[[nodiscard]] DigestsByName digests_of(const Reports& reports, const std::string& attempt);

}  // namespace tessera
