#include "checkpoint/open/kinds.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <optional>
#include <string>

#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/deepspeed.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/item_files.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/open/set_choice.h"
#include "checkpoint/read/side_file.h"
#include "format/olmo/yaml.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr bool rows_are_in_order() {
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    if (static_cast<std::size_t>(kKinds[i].kind) != i) return false;
  }
  return true;
}
static_assert(rows_are_in_order());

[[noreturn]] void refuse_option(const std::string& name, CheckpointKind kind,
                                const std::string& path) {
  throw Error(ErrorCode::invalid_argument, "the option " + name +
                                               " has no effect on a checkpoint of kind " +
                                               std::string(to_string(kind)))
      .at_path(path);
}

}  // namespace

void require_presence_used(const OpenOptions& options, CheckpointKind kind,
                           const std::string& path) {
  const bool is_safetensors = kind == CheckpointKind::safetensors;
  const bool may_trail =
      is_safetensors || is_one_of(kind, CheckpointKind::torch_file, CheckpointKind::torchscript,
                                  CheckpointKind::exported, CheckpointKind::gguf);
  if (options.rank && !is_safetensors) refuse_option("--rank", kind, path);
  if (!options.accept.empty() && !may_trail) refuse_option("--accept", kind, path);
  if (options.ignore_index && !is_safetensors && kind != CheckpointKind::torch_file)
    refuse_option("--ignore-index", kind, path);
}

void require_used(const OpenOptions& options, const Checkpoint& opened) {
  require_presence_used(options, opened.kind, opened.path);
  if (options.header_limit != OpenOptions{}.header_limit &&
      !is_one_of(opened.kind, CheckpointKind::safetensors, CheckpointKind::gguf))
    refuse_option("--header-limit", opened.kind, opened.path);
  if (opened.kind == CheckpointKind::torch_file) return;
  if (options.part) refuse_option("--part", opened.kind, opened.path);
  if (options.raw) refuse_option("--raw", opened.kind, opened.path);
}

const KindRow& row_of(CheckpointKind kind) noexcept {
  return kKinds[static_cast<std::size_t>(kind)];
}

std::string_view to_string(CheckpointKind kind) noexcept {
  return row_of(kind).name;
}

CheckpointKind kind_named(std::string_view name) {
  const auto* row = std::ranges::find(kKinds, name, &KindRow::name);
  if (row != kKinds.end()) return row->kind;
  std::string names;
  for (const KindRow& kind : kKinds) names += (names.empty() ? "" : ", ") + std::string(kind.name);
  throw Error(ErrorCode::invalid_argument, "there is no kind '" + printable(name) + "': " + names);
}

std::optional<CheckpointKind> kind_of_file_name(const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  if (extension.empty()) return std::nullopt;
  const auto* row = std::ranges::find_if(kKinds, [&extension](const KindRow& kind) {
    return std::ranges::find(kind.extensions, extension) != kind.extensions.end();
  });
  return row == kKinds.end() ? std::nullopt : std::optional(row->kind);
}

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

// Whether the file is of a DCP directory, finished or not, or of one that ranks saved without
// collectives.
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
           rank_of_own(name, "") || is_dcp_file(name) || is_world_size_file(name) ||
           deepspeed::is_file(name);
  }
  const std::string_view folder = name.substr(0, slash);
  const std::string_view file = name.substr(slash + 1);
  if (folder == olmo::kDcpFolder || is_part_folder(folder)) return is_dcp_file(file);
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

// Without an index, and beside nothing that decides otherwise: all files of weights, as the opener
// has it. An adapter, or another form of the model, is the checkpoint where nothing else is.
std::set<std::string, std::less<>> own_weights(const std::vector<ObjectInfo>& files) {
  std::set<std::string, std::less<>> weights;
  for (const ObjectInfo& file : files) {
    const bool is_of_set = is_safetensors(file.name) || is_telling(file.name, kTorchSet);
    if (is_of_set && !file.name.starts_with('.')) weights.insert(file.name);
  }
  const auto is_other = [](const std::string& name) { return is_other_form(name); };
  if (!std::ranges::all_of(weights, is_other)) std::erase_if(weights, is_other);
  return weights;
}

}  // namespace

Belonging::Belonging(const Store& store) : Belonging(store, deciding_files(store)) {}

Belonging::Belonging(const Store& store, const std::vector<ObjectInfo>& files) {
  for (const std::string_view name : names_beside(files)) own_.emplace(name);
  const std::string index = index_among(files, store);
  const auto decides = [](const ObjectInfo& file) {
    return has_known_name(file.name) && !is_side_file(file.name);
  };
  if (index.empty()) {
    if (std::ranges::any_of(files, decides)) return;
    own_ = own_weights(files);
    for (const std::string_view name : item_files(files)) own_.emplace(name);
    return;
  }
  own_.insert(index);
  try {
    for (const auto& [tensor, file] : read_set_index(store, index).files) own_.insert(file);
  } catch (const Error&) {
    return;  // only its own name is known of a damaged index
  }
}

bool Belonging::operator()(std::string_view name) const {
  if (const auto sealed = between(name, "", kSideFileSuffix)) name = *sealed;
  return has_known_name(name) || own_.contains(name);
}

void require_own_open(const Store& store) {
  (void)store.list_level(olmo::kDcpFolder);
  for (const std::string_view folder : kRankFolders) (void)store.list_level(folder);
  for (const std::string& folder : store.list_directories()) {
    if (is_part_folder(folder)) (void)store.list_level(folder);
  }
}

bool holds_checkpoint(const std::vector<ObjectInfo>& files) {
  return has_item_files(files) || std::ranges::any_of(files, [](const ObjectInfo& file) {
           return has_known_name(file.name) || is_safetensors(file.name) ||
                  is_telling(file.name, kTorchSet);
         });
}

namespace {

constexpr std::string_view kStep = "step", kUnsharded = "-unsharded";

std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto digits = text.substr(0, static_cast<std::size_t>(end - text.data()));
  if (error != std::errc() || digits != std::to_string(number) || number < 0) return std::nullopt;
  text.remove_prefix(digits.size());
  return number;
}

}  // namespace

std::string to_string(const StepName& name) {
  return std::string(kStep) + std::to_string(name.step) +
         std::string(name.unsharded ? kUnsharded : "");
}

std::optional<StepName> take_step_name(std::string_view& text) {
  if (!take_prefix(text, kStep)) return std::nullopt;
  const auto step = take_number(text);
  if (!step) return std::nullopt;
  return StepName{*step, take_prefix(text, kUnsharded)};
}

}  // namespace tessera
