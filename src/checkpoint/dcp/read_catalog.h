// The file that makes a directory a DCP checkpoint, and the data files that it names.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "checkpoint/dcp/catalog.h"
#include "format/dcp/dcp.h"
#include "tessera/layout.h"
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
#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
[[nodiscard]] std::optional<int> rank_of_data_file(std::string_view name);
#pragma GCC visibility pop

// The data files that a `.metadata` names.
[[nodiscard]] std::set<std::string> named_files(const dcp::Metadata& metadata);
// `__{rank}_{n}_{attempt}.distcp`, a name that one save only uses: torch's names lack the attempt.
[[nodiscard]] bool is_attempt_name(std::string_view name);

// The places of the tensors of a safetensors file in the whole tensors, as PyTorch's sharded
// writers say them (checkpoint-rows F-07).

inline constexpr const char* kShardingKey = "DCP_SHARDING_INFO";  // of `__metadata__`

// First elements of the tensors, by name; empty without the entry. Throws `corrupt` when the entry
// is malformed.
[[nodiscard]] std::map<std::string, Shape> sharding_offsets(
    const std::map<std::string, std::string>& metadata);

// Opens a DCP checkpoint: reads and proves what its metadata says, and puts it into a catalog.

// Throws what Checkpoint::open throws for a DCP directory: every chunk lies in its file and on
// bytes of its own, and the chunks of each tensor have every element once (checkpoint-rows P-14).
// `partial`: entries are left out whose bytes lie in missing files.
[[nodiscard]] Bytes read_catalog(const std::shared_ptr<Store>& store, bool partial = false);

// Whether a chunk of these sizes gives a tensor nothing: ranks without data leave empty ones
// (checkpoint-rows P-18). An empty tensor keeps its first. `first`: the tensor has no chunk so far.
[[nodiscard]] bool is_needless(std::span<const std::int64_t> sizes, const Shape& shape, bool first);

}  // namespace tessera
