// Writing the data files of one rank, whoever planned them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/save/save_plan.h"
#include "tessera/data_files.h"
#include "tessera/leaf.h"
#include "tessera/storage.h"

namespace tessera {

// A data_file_name() of any rank.
[[nodiscard]] bool is_data_file_of(std::string_view name, const std::string& attempt);

struct DataFile {
  const std::vector<Leaf>& leaves;
  OwnPlan& plan;  // gets the places of compressed items
  int file = 0;   // number of the rank's file
  std::string name;
  std::optional<int> zstd_level = {};
};
[[nodiscard]] std::optional<int> zstd_level(const FileRules& rules);

// Writes the items that the plan puts into it, and the tail. It is durable when this returns.
// `meter` hears of the elements, and its `stop` ends the work. Throws `mismatch` for an item of
// another length than planned. Several threads may write files of one plan.
DataDigest write_data_file(Store& store, const DataFile& file, Meter& meter);

// Bytes of the elements that the plan writes.
[[nodiscard]] std::uint64_t bytes_to_write(const std::vector<Leaf>& leaves, const OwnPlan& plan);

// What cannot be removed is left to the next save.
void remove_quietly(Store& store, const std::string& name) noexcept;

}  // namespace tessera
