#include "checkpoint/write/resume.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <span>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/place.h"
#include "io/source.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "value/equality.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::size_t kLongestName = 255;                       // what Linux file systems take
constexpr std::uint64_t kRecordLimit = std::uint64_t{1} << 30;  // bytes

// The records of a work directory, in this form of them.
constexpr int kRecords = 1;
constexpr const char* kBegun = "begun";          // the attempt
constexpr const char* kPublished = "published";  // the identity of a target that is complete
constexpr const char* kFinished = "finished";    // for each file that is, what keep() reads
std::string finished(const std::string& file) {
  return std::string(kFinished) + "/" + file;
}

// Runs that are not yet compared, by number of their storage: place, size and CRC-32.
using OpenRuns = std::vector<std::pair<std::uint64_t, std::vector<std::array<std::uint64_t, 3>>>>;

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
  if (!leaf.value.is(Value::Kind::tensor)) {
    fields.add(digest_of(leaf.value, [](const Tensor&) { return std::uint64_t{0}; }));
    return;
  }
  const Tensor& tensor = leaf.value.as_tensor();
  fields.add(tensor.dtype).add(tensor.stored).add(tensor.shape).add(tensor.pieces.size());
  for (const Piece& piece : tensor.pieces) add_piece(fields, piece);
}

// The versions of the objects that the leaves are read from. Another object may have the name of
// one that is open.
void add_versions(Fields& fields, const std::vector<Leaf>& leaves) {
  std::unordered_set<const ByteSource*> known;
  for (const Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    for (const Piece& piece : leaf.value.as_tensor().pieces) {
      if (!piece.storage || !piece.storage->source) continue;
      const ByteSource& object = part_of(*piece.storage->source).of;
      if (known.insert(&object).second) fields.add(object.version());
    }
  }
}

void add_options(Fields& fields, const ConvertOptions& options) {
  fields.add(options.to).add(options.ranks).add(options.olmo.unit).add(options.olmo.orig_params);
  fields.add(options.olmo.safetensors).add(options.olmo.model_only).add(options.olmo.config);
  fields.add(options.only)
      .add(options.slice)
      .add(options.rename)
      .add(options.dtype)
      .add(options.dequantize);
  fields.add(options.max_shard_size).add(options.keep_duplicates);
  for (const auto& [name, file] : options.file_of) fields.add(name).add(file);
  // DCP files of one rank are as many as threads.
  const bool by_thread = is_one_of(options.to, CheckpointKind::dcp, CheckpointKind::olmo_torch_new);
  fields.add(by_thread ? options.threads : 0);
}

// A digest of everything that decides about the target's bytes: the files of `source` with their
// sizes and times or versions, the versions that are open, where each of `leaves` lies in them,
// values, the target's name, the options, our version.
std::uint64_t fingerprint_of(const Checkpoint& source, const std::vector<Leaf>& leaves,
                             const std::string& target, const ConvertOptions& options) {
  Fields fields;
  fields.add(own_producer()).add(fs::path(target).filename().string());
  fields.add(source.kind).add(fs::weakly_canonical(source.path).string());
  for (const ObjectInfo& file : source.files) {
    if (!add_file(fields, source.store->name() + "/" + file.name, file.name))
      fields.add(file.name).add(file.size).add(file.version);
  }
  for (const auto& [key, text] : source.metadata) fields.add(key).add(text);
  fields.add(leaves.size());
  for (const Leaf& leaf : leaves) add_leaf(fields, leaf);
  // What is dequantized is computed from leaves of the source.
  add_versions(fields, options.dequantize ? source.leaves : leaves);
  add_options(fields, options);
  return fields.value();
}

std::string file_path(const Destination& destination) {
  return destination.directory + "/" + destination.file;
}

// Beside the target, under a name that a later run finds; of a directory that may hold other things
// already, and may be on a file system of its own, inside.
std::string work_path(const Destination& destination) {
  if (destination.publishing == Publishing::marker)
    return destination.directory + "/" + std::string(kResumeMark);
  const fs::path path(destination.publishing == Publishing::file
                          ? file_path(destination)
                          : without_slashes(destination.directory));
  const std::string name =
      path.filename().string().substr(0, kLongestName - 1 - kResumeMark.size());
  return directory_of(path) + "/." + name + std::string(kResumeMark);
}

// Whether the file is there under this name alone: a second one may be a backup's, and a link may
// lead anywhere.
bool is_alone_at(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(fs::symlink_status(path, error)) &&
         fs::hard_link_count(path, error) == 1;
}

// The files of the checkpoint that is there; none, if it is of another writer and cannot be read.
std::set<std::string> known_files(const Store& store, const std::vector<ObjectInfo>& objects) {
  try {
    return own_files(store, objects);
  } catch (const Error& error) {
    if (!is_unreadable(error.code())) throw;
    return {};
  }
}

// Whether the file is as it was when it was finished. What cannot be read is made anew.
bool is_unharmed(const Store& store, const std::string& file, const FileDigests& digests,
                 const std::stop_token& stop) {
  try {
    const auto source = guarded_source(store.open(file), digests);
    if (source->size() != digests.size) return false;
    std::vector<std::byte> block(std::min(kDigestBlock, digests.size));
    for (std::uint64_t at = 0; at < digests.size; at += block.size()) {
      require_going_on(stop);
      const auto size = std::min<std::uint64_t>(block.size(), digests.size - at);
      source->read_at(at, MutableByteView(block).first(size));
    }
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) throw;
    return false;
  }
}

}  // namespace

Resumption::Resumption(const Checkpoint& source, const std::vector<Leaf>& leaves,
                       Destination destination, const ConvertOptions& options)
    : destination_(std::move(destination)),
      if_exists_(options.overwrite ? IfExists::replace : IfExists::fail),
      // A weight that is dequantized is checked when all of it has been read, by several files.
      keeps_files_(!options.dequantize || options.ranks == 1),
      fingerprint_(fingerprint_of(source, leaves, file_path(destination_), options)),
      work_(work_path(destination_)),
      records_(posix_store(work_.path())),
      files_(posix_store(work_.content())),
      store_(*files_),
      attempt_(record(kBegun)) {
  number_storages(leaves);
  const std::string published = record(kPublished);
  finished_ = !published.empty() && published == identity_in(destination_.directory);
  if (finished_) {
    work_.remove();
    return;
  }
  try {
    begin();
  } catch (...) {
    failed(false);
    throw;
  }
}

void Resumption::number_storages(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const auto& pieces = leaf.value.as_tensor().pieces;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (numbers_.emplace(pieces[i].storage.get(), storages_.size()).second) {
        storages_.push_back({&leaf, i});
      }
    }
  }
}

// The target is a file, or a directory that gets its marker.
void Resumption::require_room() const {
  if (if_exists_ == IfExists::replace) return;
  if (destination_.publishing == Publishing::marker) {
    require_no_checkpoint(present_in(*posix_store(destination_.directory)), destination_.directory);
  } else if (fs::exists(file_path(destination_))) {
    throw Error(ErrorCode::already_exists, "a file is there already")
        .at_path(file_path(destination_));
  }
}

void Resumption::begin() {
  if (attempt_.empty()) {
    was_foreign_ = records_->exists(kBegun);
    work_.clear();
    attempt_ = random_attempt();
    write_record(kBegun, attempt_);
  }
  has_files_ = !records_->list(kFinished).empty();
  if (destination_.publishing != Publishing::directory) require_room();
  if (destination_.publishing == Publishing::marker) {
    bring_back();
    const auto there = posix_store(destination_.directory);
    remove_leftovers(*there, present_in(*there));
  }
  remove_unrecorded();
  if (destination_.publishing == Publishing::directory) {
    make_directories(work_.content());
    whole_.emplace(destination_.directory, if_exists_, work_.content());
  }
}

// A run that was killed while it moved its data files into place left some there, unless its
// checkpoint is: ours could be read.
void Resumption::bring_back() {
  const auto there = posix_store(destination_.directory);
  const std::vector<ObjectInfo> objects = there->list_level();
  const std::string end = "_" + attempt_ + ".distcp";
  const auto is_moved = [&end](const ObjectInfo& object) {
    return is_attempt_name(object.name) && object.name.ends_with(end);
  };
  if (std::ranges::none_of(objects, is_moved)) return;
  const std::set<std::string> own = known_files(*there, objects);
  for (const ObjectInfo& object : objects) {
    if (!is_moved(object) || own.contains(object.name)) continue;
    make_directories(work_.content());
    move_into_place(destination_.directory + "/" + object.name, path_of(object.name),
                    IfExists::replace);
  }
}

// What no record speaks of is not finished, or is made anew in each run.
void Resumption::remove_unrecorded() {
  std::error_code error;
  if (fs::is_directory(fs::symlink_status(work_.content(), error))) {
    remove_unrecorded(work_.content(), "");
  } else {
    remove_all(work_.content());
  }
}

void Resumption::remove_unrecorded(const std::string& directory, const std::string& below) {
  for (const DirectoryEntry& entry : entries_of(directory)) {
    const std::string name = below + entry.name;
    if (entry.is_directory) {
      remove_unrecorded(entry.path, name + "/");
      ::rmdir(entry.path.c_str());  // if nothing is left in it
    } else if (!records_->exists(finished(name)) || !is_alone_at(entry.path)) {
      remove_all(entry.path);
    }
  }
}

std::string Resumption::path_of(const std::string& file) const {
  return files_->name() + "/" + file;
}

// A digest of the sizes and times of the files that tell whether a finished target is this one:
// moving them does not change it. Empty: one of them is not there.
std::string Resumption::identity_in(const std::string& directory) const {
  std::vector<std::string> names;
  switch (destination_.publishing) {
    case Publishing::file:
      names = {destination_.file};
      break;
    case Publishing::marker:
      names = {std::string(kDcpMetadata)};
      break;
    case Publishing::directory: {
      const auto store = posix_store(directory);
      const Belonging belongs(*store);
      for (const ObjectInfo& object : store->list())
        if (belongs(object.name)) names.push_back(object.name);
    }
  }
  Fields fields;
  const std::string below = directory + "/";
  for (const std::string& name : names)
    if (!add_file(fields, below + name, name)) return {};
  return digest_text(fields.value());
}

// Binds a record to its name, to this conversion and to this form of records.
std::string Resumption::stamp(const std::string& name, std::string_view text) const {
  Fields fields;
  fields.add(kRecords).add(static_cast<std::int64_t>(fingerprint_)).add(name).add(text);
  return digest_text(fields.value());
}

std::string Resumption::record(const std::string& name) const {
  if (!records_->exists(name)) return {};
  const std::vector<std::byte> bytes = read_all(*records_->open(name), kRecordLimit);
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string_view text = all.substr(std::min(kDigestDigits, all.size()));
  return all == stamp(name, text) + std::string(text) ? std::string(text) : std::string();
}

// Durable when it returns.
void Resumption::write_record(const std::string& name, const std::string& text) {
  const std::string all = stamp(name, text) + text;
  put(*records_, name, std::as_bytes(std::span(all)), IfExists::replace);
}

FileNotes Resumption::make_file(const ConvertJob& job, const std::string& name,
                                const FileMaker& make) {
  const std::string file = (job.store.name() + "/" + name).substr(files_->name().size() + 1);
  if (std::optional<FileNotes> notes = keep(job, file)) return *std::move(notes);
  files_->remove(file);
  StorageChecks checks;
  ConvertJob own = job;
  own.checks = &checks;
  FileNotes notes = make(own);
  const std::vector<OpenCheck> open = checks.open();
  record_file(file, notes, open);
  for (const OpenCheck& check : open)
    job.checks->add(*check.stored, check.raw, check.runs, check.key);
  return notes;
}

// What the file's bytes were read from is checked together with what is read now.
std::optional<FileNotes> Resumption::keep(const ConvertJob& job, const std::string& file) {
  const std::string text = record(finished(file));
  if (text.empty()) return std::nullopt;
  const Json fields = Json::parse(text);
  const FileDigests digests{fields.at(0), digests_of_text(fields.at(1).get<std::string>())};
  if (!is_unharmed(*files_, file, digests, job.meter.stop())) return std::nullopt;
  for (const auto& [number, runs] : fields.at(3).get<OpenRuns>()) {
    const auto& [leaf, index] = storages_.at(number);
    const Tensor& tensor = leaf->value.as_tensor();
    const Piece& piece = tensor.pieces[index];
    std::vector<ReadRun> read;
    for (const auto& [at, size, crc] : runs)
      read.push_back({at, size, static_cast<std::uint32_t>(crc)});
    job.checks->add(*piece.storage, decoded_piece(tensor, piece, leaf->name).storage, read,
                    leaf->name);
  }
  store_.add(file, digests);
  bytes_kept_ += digests.size;
  job.meter.add(digests.size);
  return fields.at(2).get<FileNotes>();
}

// The file is complete and durable under its name, and a run after this one keeps it. Not where the
// source's checks could not go on then.
void Resumption::record_file(const std::string& file, const FileNotes& notes,
                             const std::vector<OpenCheck>& open) {
  OpenRuns all;
  for (const OpenCheck& check : open) {
    const auto number = numbers_.find(check.stored);
    if (number == numbers_.end()) return;
    auto& runs = all.emplace_back(number->second, OpenRuns::value_type::second_type()).second;
    for (const ReadRun& run : check.runs) runs.push_back({run.at, run.size, run.crc});
  }
  if (!keeps_files_) return;
  const FileDigests digests = store_.digests_of(file);
  const Json fields = Json::array({digests.size, digests_text(digests.blocks), notes, all});
  write_record(finished(file), fields.dump());
  has_files_ = true;
}

void Resumption::publish() {
  write_record(kPublished, identity_in(files_->name()));
  switch (destination_.publishing) {
    case Publishing::file:
      publish_file(destination_.file, if_exists_);
      break;
    case Publishing::marker:
      publish_marked();
      break;
    case Publishing::directory:
      whole_->commit(Belonging(*posix_store(destination_.directory)));
      break;
  }
  work_.remove();
}

void Resumption::publish_file(const std::string& name, IfExists if_exists) {
  move_into_place(path_of(name), destination_.directory + "/" + name, if_exists);
}

// Data files first, durable under their names, then what makes them a checkpoint.
void Resumption::publish_marked() {
  for (const ObjectInfo& object : files_->list()) {
    if (object.name != kDcpMetadata) publish_file(object.name, IfExists::fail);
  }
  publish_file(std::string(kDcpMetadata), if_exists_);
}

void Resumption::failed(bool source_is_damaged) {
  if (source_is_damaged || !has_files_) work_.remove();
}

}  // namespace tessera
