// `model.safetensors.index.json`: which file of a set holds which tensor
// (docs/formats/safetensors.md).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/io.h"

namespace tessera::safetensors {

inline constexpr const char* kIndexSuffix = ".safetensors.index.json";
inline constexpr const char* kTorchIndexSuffix = ".bin.index.json";  // of files of torch.save
inline constexpr std::uint64_t kIndexLimit = 256u
                                             << 20;  // bytes; a million tensors take about 100 MB

struct Index {
  std::map<std::string, std::string> files;  // weight_map: tensor name -> file name
  std::optional<std::uint64_t> total_size;   // of all tensors in bytes; some writers leave it out
};

[[nodiscard]] inline bool is_index(std::string_view name) noexcept {
  return name.ends_with(kIndexSuffix) || name.ends_with(kTorchIndexSuffix);
}

// Throws `unsafe` when a file name is more than a name (a folder, a drive, ".."), `limit` for JSON
// nested deeper than 64, `corrupt` for a repeated name, a file name that is no string, a missing
// weight_map and everything that is not JSON. Members that it does not know are skipped.
[[nodiscard]] Index read_index(ByteView text);

// As huggingface_hub writes it: sorted, indented by two, ASCII, with a line feed at the end.
[[nodiscard]] std::string encode_index(const Index& index);

}  // namespace tessera::safetensors
