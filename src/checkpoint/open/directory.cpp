#include "checkpoint/open/directory.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "base/text.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/side_file.h"
#include "format/olmo/yaml.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 5> kStates{"used", "superseded", "missing", "not part of it",
                                                  "not understood"};

using RowByName = std::map<std::string, FileRow, std::less<>>;

bool is_one_object(const Checkpoint& checkpoint) {
  return checkpoint.files.size() == 1 &&
         checkpoint.path == checkpoint.store->name() + "/" + checkpoint.files[0].name;
}

// Whether it is read beside what the leaves lie in: digests, and what describes an OLMo checkpoint.
// DCP's of older torch have no id by which their side file is known.
bool is_beside(const Checkpoint& checkpoint, const std::string& name) {
  if (is_one_of(name, kDirectorySideFile, kStateFile)) return true;
  if (is_side_file_name(name))
    return checkpoint.save_id.empty() || name == side_file_name(checkpoint.save_id);
  return is_olmo_kind(checkpoint.kind) && is_one_of(name, "config.yaml", olmo::kWorldFile);
}

// A file of which the opener said nothing.
FileRow row_of_other(const Checkpoint& checkpoint, const ObjectInfo& file) {
  if (is_beside(checkpoint, file.name)) return {file.name, FileState::used, "", file.size};
  if (holds_checkpoint({file})) {
    return {file.name, FileState::not_understood,
            "it has the name of a checkpoint's file, and this one does not name it", file.size};
  }
  return {file.name, FileState::not_part, "", file.size};
}

void add_others(const Checkpoint& checkpoint, RowByName& rows) {
  for (const ObjectInfo& file : deciding_files(*checkpoint.store)) {
    const auto [row, fresh] = rows.try_emplace(file.name);
    if (fresh) row->second = row_of_other(checkpoint, file);
    row->second.size = file.size;
  }
}

}  // namespace

std::string_view to_string(FileState state) noexcept {
  return kStates[static_cast<std::size_t>(state)];
}

FileRow missing_row(std::string name, std::string reason) {
  return {std::move(name), FileState::missing, std::move(reason)};
}

void remark(std::vector<FileRow> rows, Checkpoint& checkpoint) {
  std::map<std::pair<FileState, std::string>, Named> said;
  for (FileRow& row : rows) {
    if (!row.reason.empty()) said[{row.state, row.reason}].add(printable(row.name, 200));
    checkpoint.remarks.push_back(std::move(row));
  }
  for (const auto& [what, names] : said) {
    const auto& [state, reason] = what;
    std::string warning = names.text() + ": ";
    if (state != FileState::used) warning.append(to_string(state)).append(", ");
    checkpoint.warnings.push_back(warning + reason);
  }
}

bool lacks_files(const Checkpoint& checkpoint) {
  return std::ranges::find(checkpoint.remarks, FileState::missing, &FileRow::state) !=
         checkpoint.remarks.end();
}

Error reworded(const Error& error, std::string text) {
  Error told(error.code(), std::move(text));
  if (!error.path().empty()) told.at_path(error.path());
  if (!error.key().empty()) told.at_key(error.key());
  if (error.offset()) told.at_offset(*error.offset());
  if (error.is_no_checkpoint()) told.as_no_checkpoint();
  return told;
}

Error all_of(const std::vector<Error>& faults) {
  if (faults.size() == 1) return faults.front();
  Named others;
  for (std::size_t i = 1; i < faults.size(); ++i)
    others.add(printable(faults[i].path(), 300) + ": " + faults[i].message());
  return reworded(faults.front(), faults.front().message() + "; and " + others.text());
}

Error without_offers(const Error& error,
                     const std::function<bool(const std::string& option)>& has) {
  constexpr std::array<std::string_view, 4> kOffers{"--partial", "--ignore-index", "--rank",
                                                    "--accept"};
  std::string text = error.message();
  for (const std::string_view option : kOffers) {
    if (has && has(std::string(option))) continue;
    for (const char* const before : {"; ", ": "}) {
      const std::size_t begin = text.find(before + std::string(option) + " ");
      if (begin == std::string::npos) continue;
      const std::size_t end = text.find(';', begin + 1);
      text.erase(begin, end == std::string::npos ? end : end - begin);
    }
  }
  // What several ranks say has places in its text already.
  if (text == error.message() || !error.peers().empty()) return error;
  return reworded(error, std::move(text));
}

bool accepts(const OpenOptions& options, std::string_view fault) {
  return std::ranges::find(options.accept, fault) != options.accept.end();
}

void require_known_faults(const OpenOptions& options) {
  for (const std::string& word : options.accept) {
    if (word == kTrailingBytes) continue;
    throw Error(ErrorCode::invalid_argument, "there is no fault '" + printable(word, 100) +
                                                 "' to accept: " + std::string(kTrailingBytes));
  }
}

std::vector<FileRow> Checkpoint::directory() const {
  RowByName rows;
  for (const ObjectInfo& file : files)
    rows[file.name] = {file.name, FileState::used, "", file.size};
  for (const FileRow& row : remarks) {
    const std::uint64_t size = rows.contains(row.name) ? rows[row.name].size : row.size;
    (rows[row.name] = row).size = size;
  }
  if (store && !is_one_object(*this)) add_others(*this, rows);
  std::vector<FileRow> table;
  table.reserve(rows.size());
  for (auto& [name, row] : rows) table.push_back(std::move(row));
  return table;
}

void Checkpoint::require_files() const {
  if (!lacks_files(*this)) return;
  for (const Leaf& leaf : leaves) require_here(leaf);
}

}  // namespace tessera
