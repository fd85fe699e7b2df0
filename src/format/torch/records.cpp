#include "format/torch/records.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "base/text.h"
#include "format/pickle/text.h"
#include "io/source.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::torch_file {
namespace {

constexpr std::uint64_t kTextCap = 64;        // bytes of version and byteorder
constexpr std::uint64_t kNewestVersion = 10;  // of the archive format, as PyTorch reads
constexpr std::size_t kNameCap = 4096;        // bytes of an entry's name

// Archives of PyTorch that torch.save did not write, by the record that each has.
struct Other {
  ArchiveKind kind;
  std::string_view record;
  std::string_view what;
  bool has_folder = true;
};
constexpr std::array<Other, 5> kOthers = {{
    {ArchiveKind::script, "constants.pkl", "a TorchScript archive"},
    {ArchiveKind::script_of_10, "model.json", "a TorchScript archive, as torch wrote before 1.4"},
    {ArchiveKind::package, ".data/extern_modules", "an archive of torch.package"},
    {ArchiveKind::exported, "archive_format", "an archive of torch.export"},
    {ArchiveKind::exported_27, "serialized_exported_program.json",
     "an archive of torch.export, as torch wrote before 2.8", false},
}};

// What a loader runs, by the beginnings of records.
struct Program {
  ArchiveKind kind;
  std::string_view prefix;
  std::string_view what;
};
constexpr std::array<Program, 5> kPrograms = {{
    {ArchiveKind::script, "code/", "which torch.jit.load compiles"},
    {ArchiveKind::script_of_10, "code/", "which torch.jit.load compiles"},
    {ArchiveKind::exported, "models/", "which torch.export.load evaluates, as Python in places"},
    {ArchiveKind::exported, "data/aotinductor/", "compiled code, which torch loads and runs"},
    {ArchiveKind::exported_27, "serialized_exported_program.json",
     "which torch.export.load evaluates, as Python in places"},
}};

// With the slash; empty: none.
std::string folder_of(const std::string& record) {
  const std::size_t slash = record.find('/');
  return slash == std::string::npos ? "" : record.substr(0, slash + 1);
}

// Whether this is the folder of an archive as torch writes it: one name and a slash.
bool is_folder(std::string_view root) {
  return !is_one_of(root, "", "/", "./", "../") &&
         root.find_first_of(std::string_view("\\\0", 2)) == std::string_view::npos;
}

}  // namespace

ArchiveKind kind_of(const zip::Archive& archive) {
  if (archive.entries().empty()) return ArchiveKind::torch_save;
  const std::string root = folder_of(archive.entries().front().name);
  for (const Other& other : kOthers) {
    const std::string record = (other.has_folder ? root : "") + std::string(other.record);
    if (archive.find(record) != nullptr) return other.kind;
  }
  return ArchiveKind::torch_save;
}

ArchiveKind kind_by_names(std::string_view end) {
  const auto* const found = std::ranges::find_if(kOthers, [end](const Other& other) {
    return end.find((other.has_folder ? "/" : "") + std::string(other.record)) !=
           std::string_view::npos;
  });
  return found == kOthers.end() ? ArchiveKind::torch_save : found->kind;
}

std::string_view describe(ArchiveKind kind) noexcept {
  const auto* const found = std::ranges::find(kOthers, kind, &Other::kind);
  return found == kOthers.end() ? std::string_view() : found->what;
}

std::vector<std::string> programs_in(const zip::Archive& archive) {
  const ArchiveKind kind = kind_of(archive);
  if (kind == ArchiveKind::torch_save) return {};
  const std::string start = std::string(describe(kind)) + ", whose own program is not looked into";
  const std::string root =
      kind == ArchiveKind::exported_27 ? std::string() : folder_of(archive.entries().front().name);
  std::vector<std::string> lines;
  for (const Program& program : kPrograms) {
    if (program.kind != kind) continue;
    const std::string prefix = root + std::string(program.prefix);
    std::string first;
    std::size_t count = 0;
    for (const zip::Entry& entry : archive.entries()) {
      if (!entry.name.starts_with(prefix) || entry.name.ends_with(".debug_pkl")) continue;
      if (count++ == 0) first = printable(entry.name.substr(root.size()), 200);
    }
    if (count == 0) continue;
    std::string& line = lines.emplace_back(start);
    line.append(": ").append(first);
    if (count > 1) line.append(" and ").append(std::to_string(count - 1)).append(" more");
    line.append(", ").append(program.what);
  }
  if (lines.empty()) lines.push_back(start);
  return lines;
}

std::optional<zip::Archive> archive_of(const std::shared_ptr<const ByteSource>& source,
                                       std::initializer_list<ArchiveKind> kinds) {
  const auto head = head_of<2>(*source);
  if (head[0] != 'P' || head[1] != 'K') return std::nullopt;
  try {
    zip::Archive archive(source, zip::Deflated::allow);
    if (std::ranges::find(kinds, kind_of(archive)) == kinds.end()) return std::nullopt;
    return archive;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return std::nullopt;
  }
}

Records::Records(zip::Archive archive) : archive_(std::move(archive)), kind_(kind_of(archive_)) {
  if (kind_ != ArchiveKind::exported_27) find_root();
}

void Records::fail(ErrorCode code, std::string what) const {
  throw Error(code, std::move(what)).at_path(name());
}

// All records lie in one folder, which the first one names.
void Records::find_root() {
  if (archive_.entries().empty())
    fail(ErrorCode::corrupt, "a zip archive without entries, expected torch.save's");
  const std::string& first = archive_.entries().front().name;
  root_ = folder_of(first);
  if (!is_folder(root_)) {
    fail(ErrorCode::corrupt, "zip entry '" + first + "' is not in a folder of torch.save");
  }
  for (const zip::Entry& entry : archive_.entries()) require_entry(entry);
}

void Records::require_entry(const zip::Entry& entry) const {
  if (entry.name.size() > kNameCap) {
    fail(ErrorCode::limit,
         "a zip entry with a name of " + std::to_string(entry.name.size()) + " bytes");
  }
  try {
    pickle::require_utf8(entry.name);
  } catch (Error& error) {
    throw error.at_path(name());
  }
  if (!entry.name.starts_with(root_)) {
    fail(ErrorCode::corrupt,
         "zip entry '" + entry.name + "' is outside of the folder '" + root_ + "'");
  }
}

std::string Records::text(std::string_view record) const {
  const zip::Entry* entry = find(record);
  if (entry == nullptr) return {};
  const std::vector<std::byte> bytes = archive_.read(*entry, kTextCap);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void Records::require_readable() const {
  require_version();
  require_byte_order();
}

void Records::require_version() const {
  std::string version = text("version");
  if (version.empty()) version = text(".data/version");
  while (version.ends_with('\n')) version.pop_back();
  const std::uint64_t number = parse_version(version);
  if (number == 0 || number > kNewestVersion) {
    fail(ErrorCode::unsupported, "archive version " + version + ", versions 1 to 10 are read");
  }
}

std::uint64_t Records::parse_version(const std::string& version) const {
  std::uint64_t number = 0;
  const char* const last = version.data() + version.size();
  const auto [end, problem] = std::from_chars(version.data(), last, number);
  if (problem != std::errc() || end != last) {
    fail(ErrorCode::corrupt, "the archive's version is '" + version + "', expected a number");
  }
  return number;
}

void Records::require_byte_order() const {
  const std::string order = text("byteorder");
  if (order == "big") fail(ErrorCode::unsupported, "a big-endian archive");
  if (!is_one_of(order, "", "little"))
    fail(ErrorCode::corrupt, "the archive's byteorder is '" + order + "'");
}

}  // namespace tessera::torch_file
