#include "checkpoint/open/kinds.h"

#include <algorithm>
#include <cstddef>
#include <string>

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

[[noreturn]] void refuse_option(const std::string& name, const Checkpoint& opened) {
  throw Error(ErrorCode::invalid_argument, "the option " + name +
                                               " has no effect on a checkpoint of kind " +
                                               std::string(to_string(opened.kind)))
      .at_path(opened.path);
}

}  // namespace

void require_used(const OpenOptions& options, const Checkpoint& opened) {
  if (options.header_limit != OpenOptions{}.header_limit &&
      opened.kind != CheckpointKind::safetensors)
    refuse_option("--header-limit", opened);
  if (opened.kind == CheckpointKind::torch_file) return;
  if (options.part) refuse_option("--part", opened);
  if (options.raw) refuse_option("--raw", opened);
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

}  // namespace tessera
