#include "checkpoint/write/journal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <span>
#include <sstream>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/text.h"
#include "checkpoint/read/side_file.h"
#include "storage/posix/system.h"

namespace tessera {
namespace {

// A digest of fields, each behind its length, so that none runs into the next.
class Fields {
 public:
  Fields& add(std::string_view text) {
    const std::string size = std::to_string(text.size()) + ":";
    digest_.add(std::as_bytes(std::span(size)));
    digest_.add(std::as_bytes(std::span(text)));
    return *this;
  }
  template <typename Number>
  requires std::is_arithmetic_v<Number> || std::is_enum_v<Number> Fields& add(Number number) {
    return add(std::string_view(std::to_string(static_cast<std::int64_t>(number))));
  }
  template <typename Item>
  Fields& add(const std::optional<Item>& item) {
    add(item.has_value());
    return item ? add(*item) : *this;
  }
  template <typename Item>
  Fields& add(const std::vector<Item>& items) {
    add(items.size());
    for (const Item& item : items) add(item);
    return *this;
  }
  [[nodiscard]] std::uint64_t value() const { return digest_.value(); }

 private:
  RunningDigest digest_;
};

// False: it is not there.
bool add_file(Fields& fields, const std::string& path, const std::string& name) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return false;
  fields.add(name).add(status.st_size).add(status.st_mtim.tv_sec).add(status.st_mtim.tv_nsec);
  return true;
}

void add_piece(Fields& fields, const Piece& piece) {
  fields.add(to_string(piece.slice)).add(piece.storage_offset).add(piece.strides);
  fields.add(piece.conj).add(piece.neg);
  if (!piece.storage) return;
  const Storage& storage = *piece.storage;
  fields.add(storage.source ? storage.source->name() : std::string());
  fields.add(storage.offset).add(storage.size).add(storage.encoding).add(storage.crc32);
}

void add_leaf(Fields& fields, const Leaf& leaf) {
  fields.add(leaf.name);
  if (!leaf.value.is(Value::Kind::tensor)) return;
  const Tensor& tensor = leaf.value.as_tensor();
  fields.add(tensor.dtype).add(tensor.stored).add(tensor.shape).add(tensor.pieces.size());
  for (const Piece& piece : tensor.pieces) add_piece(fields, piece);
}

void add_options(Fields& fields, const ConvertOptions& options) {
  fields.add(options.to).add(options.ranks).add(options.olmo.unit).add(options.olmo.orig_params);
  fields.add(options.olmo.safetensors).add(options.olmo.model_only).add(options.olmo.config);
  fields.add(options.only).add(options.rename).add(options.dtype).add(options.dequantize);
  fields.add(options.max_shard_size).add(options.keep_duplicates);
  for (const auto& [name, file] : options.file_of) fields.add(name).add(file);
  // Of one rank's DCP files there are as many as threads.
  const bool by_thread = is_one_of(options.to, CheckpointKind::dcp, CheckpointKind::olmo_torch_new);
  fields.add(by_thread ? options.threads : 0);
}

}  // namespace

std::uint64_t fingerprint_of(const Checkpoint& source, const std::vector<Leaf>& leaves,
                             const std::string& target, const ConvertOptions& options) {
  namespace fs = std::filesystem;
  Fields fields;
  fields.add(own_producer()).add(fs::path(target).filename().string());
  fields.add(source.kind).add(fs::weakly_canonical(source.path).string());
  for (const ObjectInfo& file : source.files) {
    add_file(fields, source.store->name() + "/" + file.name, file.name);
  }
  fields.add(leaves.size());
  for (const Leaf& leaf : leaves) add_leaf(fields, leaf);
  add_options(fields, options);
  return fields.value();
}

std::optional<std::uint64_t> identity_of(const std::string& directory,
                                         const std::vector<std::string>& names) {
  Fields fields;
  for (const std::string& name : names) {
    const std::string path = std::filesystem::path(directory) / name;
    if (!add_file(fields, path, name)) return std::nullopt;
  }
  return fields.value();
}

namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr std::size_t kStamp = kDigestDigits + 1;  // and a space

Json to_json(const JournalUnit& unit) {
  Json open = Json::array();
  for (const OpenCheck& check : unit.open) {
    Json runs = Json::array();
    for (const ReadRun& run : check.runs) {
      runs.push_back(Json::array({run.at, run.size, run.crc}));
    }
    open.push_back(Json::array({check.storage, runs}));
  }
  return Json::array(
      {"unit", unit.file, unit.what, unit.at, unit.size, unit.digest, unit.crc, open});
}

JournalUnit unit_of(const Json& row) {
  JournalUnit unit;
  unit.file = row.at(1).get<std::string>();
  unit.what = row.at(2).get<std::uint64_t>();
  unit.at = row.at(3).get<std::uint64_t>();
  unit.size = row.at(4).get<std::uint64_t>();
  unit.digest = row.at(5).get<std::uint64_t>();
  unit.crc = row.at(6).get<std::uint32_t>();
  for (const Json& check : row.at(7)) {
    OpenCheck open{check.at(0).get<std::uint64_t>(), {}};
    for (const Json& run : check.at(1)) {
      open.runs.push_back({run.at(0).get<std::uint64_t>(), run.at(1).get<std::uint64_t>(),
                           run.at(2).get<std::uint32_t>()});
    }
    unit.open.push_back(std::move(open));
  }
  return unit;
}

std::string content(int fd, const std::string& path) {
  std::string text;
  std::array<char, 1 << 16> part{};
  for (;;) {
    const ssize_t got = uninterrupted(
        [&] { return ::pread(fd, part.data(), part.size(), static_cast<off_t>(text.size())); });
    if (got < 0) throw_errno(errno, "read", path);
    if (got == 0) return text;
    text.append(part.data(), static_cast<std::size_t>(got));
  }
}

}  // namespace

Journal::Journal(int fd, std::string path, std::uint64_t fingerprint, const std::string& attempt)
    : fd_(fd), path_(std::move(path)), fingerprint_(fingerprint) {
  const std::string text = content(fd_, path_);
  try {
    read(text);
  } catch (const Json::exception&) {
    // The digests are right and the content is not: nobody's journal.
    goes_on_ = false;
    units_.clear();
    published_.reset();
  }
  was_foreign_ = !goes_on_ && !text.empty();
  if (!goes_on_) {
    begin(attempt);
  } else if (!text.ends_with('\n')) {
    append_line("");  // what was torn off ends here
  }
}

void Journal::read(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::string payload = payload_of(line);
    if (!payload.empty()) read_row(payload);
    if (!goes_on_) return;  // the first line is what binds the rest to this conversion
  }
}

std::string Journal::payload_of(const std::string& line) const {
  if (line.size() < kStamp) return {};
  std::string payload = line.substr(kStamp);
  return line == stamp(payload) ? payload : std::string();
}

void Journal::read_row(const std::string& payload) {
  const Json row = Json::parse(payload);
  const auto kind = row.at(0).get<std::string>();
  if (!goes_on_) {
    if (kind != "begin" || row.at(1) != kVersion) return;
    attempt_ = row.at(2).get<std::string>();
    goes_on_ = true;
  } else if (kind == "unit") {
    JournalUnit unit = unit_of(row);
    units_.insert_or_assign({unit.file, unit.at}, std::move(unit));
  } else if (kind == "published") {
    published_ = row.at(1).get<std::uint64_t>();
  }
}

void Journal::begin(const std::string& attempt) {
  if (::ftruncate(fd_, 0) != 0) throw_errno(errno, "truncate", path_);
  attempt_ = attempt;
  append_line(Json::array({"begin", kVersion, attempt}).dump());
}

const JournalUnit* Journal::find(const std::string& file, std::uint64_t at) const {
  const auto found = units_.find({file, at});
  return found == units_.end() ? nullptr : &found->second;
}

void Journal::append(const JournalUnit& unit) {
  // A name that is not UTF-8 is not found again, and its file made anew.
  append_line(to_json(unit).dump(-1, ' ', true, Json::error_handler_t::replace));
}

void Journal::append_published(std::uint64_t identity) {
  append_line(Json::array({"published", identity}).dump());
  if (::fdatasync(fd_) != 0) throw_errno(errno, "fsync", path_);
}

void Journal::append_line(const std::string& payload) {
  const std::string line = (payload.empty() ? "" : stamp(payload)) + "\n";
  const std::lock_guard lock(mutex_);
  for (std::string_view rest = line; !rest.empty();) {
    const ssize_t wrote = uninterrupted([&] { return ::write(fd_, rest.data(), rest.size()); });
    if (wrote < 0) throw_errno(errno, "write", path_);
    rest.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

std::string Journal::stamp(const std::string& payload) const {
  const std::string guarded = std::to_string(fingerprint_) + " " + payload;
  return digest_text(digest64(std::as_bytes(std::span(guarded)))) + " " + payload;
}

}  // namespace tessera
