#include "checkpoint/open/belonging.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/one_of.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/side_file.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "format/olmo/config.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// What is left of the text without its ends; none: it has others.
std::optional<std::string_view> between(std::string_view text, std::string_view start,
                                        std::string_view end) {
  if (text.size() < start.size() + end.size() || !text.starts_with(start) || !text.ends_with(end))
    return std::nullopt;
  text.remove_prefix(start.size());
  text.remove_suffix(end.size());
  return text;
}

bool is_side_file(std::string_view file) {
  return file == kDirectorySideFile || is_side_file_name(file);
}

// Of a DCP directory, finished or not, or of one that ranks saved without collectives.
bool is_dcp_file(std::string_view file) {
  const std::string_view metadata = between(file, "", ".tmp").value_or(file);
  return metadata == kDcpMetadata || is_rank_metadata(metadata) || between(file, "__", ".distcp") ||
         is_side_file(file);
}

bool is_safetensors(std::string_view name) {
  return name.ends_with(".safetensors") && name.find('/') == std::string_view::npos;
}

constexpr std::array<std::string_view, 3> kRankFolders{"model", "optim", "train"};

// Those that have the same names in every checkpoint.
bool has_known_name(std::string_view name) {
  const std::size_t slash = name.rfind('/');
  if (slash == std::string_view::npos) {
    return is_one_of(name, "config.yaml", olmo::kWorldFile, "model.pt", "optim.pt", "train.pt",
                     "other.pt", "optim.safetensors", kSafetensorsSet.usual,
                     kSafetensorsSet.usual_index, kTorchSet.usual, kTorchSet.usual_index) ||
           rank_of_own(name, "") || is_dcp_file(name) || is_world_size_file(name);
  }
  const std::string_view folder = name.substr(0, slash);
  const std::string_view file = name.substr(slash + 1);
  if (folder == olmo::kDcpFolder) return is_dcp_file(file);
  return std::ranges::find(kRankFolders, folder) != kRankFolders.end() &&
         rank_of_own(name, std::string(folder)).has_value();
}

// The index that speaks for the directory, as its opener has it; empty: none, or too many.
std::string index_among(const std::vector<ObjectInfo>& files, const Store& store) {
  try {
    return find_index(files, has_safetensors(files) ? kSafetensorsSet : kTorchSet, store);
  } catch (const Error&) {
    return "";
  }
}

}  // namespace

Belonging::Belonging(const Store& store) : Belonging(store, deciding_files(store)) {}

Belonging::Belonging(const Store& store, const std::vector<ObjectInfo>& files) {
  const std::string index = index_among(files, store);
  const auto decides = [](const ObjectInfo& file) {
    return has_known_name(file.name) && !is_side_file(file.name);
  };
  all_safetensors_ = index.empty() && std::ranges::none_of(files, decides);
  if (index.empty()) return;
  in_index_.insert(index);
  try {
    for (const auto& [tensor, file] : read_set_index(store, index).files) in_index_.insert(file);
  } catch (const Error&) {
    return;  // of a damaged one nothing is known but its own name
  }
}

bool Belonging::operator()(std::string_view name) const {
  if (const auto sealed = between(name, "", kSideFileSuffix)) name = *sealed;
  return has_known_name(name) || in_index_.contains(name) ||
         (all_safetensors_ && is_safetensors(name));
}

void require_own_open(const Store& store) {
  (void)store.list_level(olmo::kDcpFolder);
  for (const std::string_view folder : kRankFolders) (void)store.list_level(folder);
}

bool holds_checkpoint(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, [](const ObjectInfo& file) {
    return has_known_name(file.name) || is_safetensors(file.name) ||
           file.name.ends_with(kTorchSet.index_suffix);
  });
}

}  // namespace tessera
