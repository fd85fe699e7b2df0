// The file that makes a directory a DCP checkpoint, and the data files that it names.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "format/dcp/dcp.h"
#include "tessera/storage.h"

namespace tessera {

inline constexpr std::string_view kDcpMetadata = ".metadata";
inline constexpr std::uint64_t kMetadataLimit = std::uint64_t{4}
                                                << 30;  // bytes of a `.metadata` we read

// `name`: that file, or `__{rank}.metadata` of a save without collectives.
[[nodiscard]] dcp::Metadata read_dcp_metadata(const Store& store,
                                              std::string_view name = kDcpMetadata);
[[nodiscard]] dcp::Metadata read_dcp_metadata(const ByteSource& file);

// `__{rank}.metadata`: how it is called, and whether a file is one.
[[nodiscard]] std::string rank_metadata(int rank);
[[nodiscard]] bool is_rank_metadata(std::string_view name);
// Whose data file `__{rank}_...` is; none: the name does not say.
[[nodiscard]] std::optional<int> rank_of_data_file(std::string_view name);

// The data files that a `.metadata` names.
[[nodiscard]] std::set<std::string> named_files(const dcp::Metadata& metadata);
// `__{rank}_{n}_{attempt}.distcp`, a name that one save only uses: torch's names lack the attempt.
[[nodiscard]] bool is_attempt_name(std::string_view name);

}  // namespace tessera
