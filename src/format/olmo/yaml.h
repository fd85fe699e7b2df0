// The two YAML files of OLMo's checkpoints, and what their parts are called (checkpoint-rows F-08,
// docs/formats/olmo.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::olmo {

inline constexpr std::string_view kConfigFile = "config.yaml";
inline constexpr std::string_view kWorldFile = "metadata.yaml";
inline constexpr std::string_view kDcpFolder = "model_and_optim";  // of torch_new
inline constexpr std::uint64_t kYamlLimit = 16 << 20;              // bytes of a file

// One YAML document as values: dicts, lists and scalars typed as OLMo's loader (OmegaConf over
// PyYAML) types them: `no` is false, 012 is 10, 1_000 is 1000, dates and interpolations (`${...}`)
// stay text. An alias is the node of its anchor. An empty document is none.
//
// Throws `corrupt` for what YAML or OmegaConf refuses (several documents, duplicate keys, an alias
// of nothing or of what it stands in, tabs that indent, bytes that are not UTF-8, a byte order
// mark), `limit` for more than 16 MiB, nesting beyond 100 or aliases that multiply the document
// tenfold, `unsafe` for a tag that names a Python object, `unsupported` for other tags. Errors
// carry the offset.
[[nodiscard]] Value parse_yaml(ByteView text);

// `world_size` of a metadata.yaml. Throws as parse_yaml; `corrupt` when it is not a number from 1
// to kMostRanks.
inline constexpr std::int64_t kMostRanks = 1 << 20;
[[nodiscard]] int world_size_of(ByteView metadata_yaml);
// `sharded_checkpointer` of a config.yaml, when it says one. Throws as parse_yaml.
[[nodiscard]] std::optional<std::string> sharded_checkpointer_of(ByteView config_yaml);

// The type of a plain YAML scalar, by the rules of PyYAML (YAML 1.1) as OmegaConf changes them.

// None, a bool, an integer, a real, or the text itself. Throws `limit` for an integer of more than
// 4300 digits, or of more than 64 bits in a base other than ten.
[[nodiscard]] Value plain_scalar(std::string_view text);

}  // namespace tessera::olmo
