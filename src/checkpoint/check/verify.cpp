#include "checkpoint/check/verify.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <unordered_set>

#include "base/parallel.h"
#include "base/text.h"
#include "checkpoint/check/named_files.h"
#include "checkpoint/check/saved_state.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/read/storage_checks.h"
#include "format/torch/torch_file.h"
#include "io/checked_source.h"
#include "storage/lazy_source.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/verify.h"
#include "value/children.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

Shape shape_of(const Slice& slice) {
  if (const auto* box = std::get_if<Box>(&slice)) return box->sizes;
  return {numel(slice)};
}

// The part that a piece holds, as a tensor of its own.
Tensor part_of(const Tensor& tensor, const Piece& piece) {
  Tensor part;
  part.dtype = tensor.dtype;
  part.shape = shape_of(piece.slice);
  part.pieces.push_back(piece);
  part.pieces[0].slice = whole(part.shape);
  return part;
}

[[noreturn]] void refuse(const Piece& kept, const Piece& other, const std::string& name) {
  throw Error(ErrorCode::mismatch, "ranks " + std::to_string(kept.rank) + " and " +
                                       std::to_string(other.rank) + " hold copies of " +
                                       to_string(kept.slice) + " that differ")
      .at_key(name);
}

}  // namespace

void require_same_copies(const Checkpoint& checkpoint, const Leaf& replica) {
  const Leaf* leaf = checkpoint.find(replica.name);
  if (leaf == nullptr) return;  // left out of this checkpoint
  const Tensor& tensor = leaf->value.as_tensor();
  for (const Piece& other : replica.value.as_tensor().pieces) {
    const auto kept = std::ranges::find(tensor.pieces, other.slice, &Piece::slice);
    if (kept == tensor.pieces.end()) continue;
    if (!same_elements(part_of(tensor, *kept), part_of(tensor, other), replica.name))
      refuse(*kept, other, replica.name);
  }
}

std::uint64_t bytes_of(const std::vector<Leaf>& replicas) {
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : replicas) {
    const Tensor& tensor = leaf.value.as_tensor();
    for (const Piece& piece : tensor.pieces) bytes += byte_size(tensor.dtype, {numel(piece.slice)});
  }
  return bytes;
}

namespace {

constexpr std::uint64_t kPart = 64 * kDigestBlock;  // bytes of a file that one thread takes at once

// Part of a file with digests.
struct FilePart {
  std::shared_ptr<const ByteSource> source;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Files whose digest is their name, by the name of their source.
using NamedFiles = std::map<std::string, NamedFile, std::less<>>;

// The files whose bytes are checked by digests as they are read, and not as a whole by a name.
std::vector<FilePart> checked_parts(const Checkpoint& checkpoint, const NamedFiles& named) {
  std::vector<FilePart> parts;
  for (const auto& [name, source] : sources_of(checkpoint)) {
    if (!source->checked() || named.contains(name)) continue;
    for (std::uint64_t at = 0; at < source->size(); at += kPart)
      parts.push_back({source, at, std::min(at + kPart, source->size())});
  }
  return parts;
}

// The findings of one piece of work.
struct Checked {
  std::vector<CheckedBytes> files = {};
  std::uint64_t bytes_again = 0;  // read for a digest of a tensor, and counted above by other work

  void add(const std::string& file, CheckedBy by, std::uint64_t bytes) {
    if (files.empty() || files.back().by != by || files.back().file != file)
      files.push_back({file, by, 0});
    files.back().bytes += bytes;
  }
  void add(const Checked& more) {
    for (const CheckedBytes& one : more.files) add(one.file, one.by, one.bytes);
  }
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t bytes = bytes_again;
    for (const CheckedBytes& one : files) bytes += one.bytes;
    return bytes;
  }
};

Checked check_part(const FilePart& part) {
  Checked checked;
  std::vector<std::byte> window(static_cast<std::size_t>(kDigestBlock));
  for (std::uint64_t at = part.begin; at < part.end; at += window.size()) {
    const auto bytes = MutableByteView(window).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), part.end - at)));
    part.source->read_at(at, bytes);
    checked.add(part.source->name(), CheckedBy::digests, bytes.size());
  }
  return checked;
}

// Storages that some thread has taken upon itself: several tensors may be views of one.
class Claims {
 public:
  [[nodiscard]] bool is_first(const Storage& storage) {
    const std::lock_guard lock(mutex_);
    return claimed_.insert(&storage).second;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const Storage*> claimed_;  // guarded by mutex_
};

// How tensors are checked.
struct TensorChecks {
  const NamedFiles& named;
  Claims claims = {};

  // Whether the storage's file is checked as a file.
  [[nodiscard]] bool leave(const Storage& storage) const {
    return storage.source && (storage.source->checked() || named.contains(storage.source->name()));
  }
};

// Reads one tensor's storages whole, less those that another tensor's check has read and those
// whose files are checked as files.
Checked check_tensor(const Leaf& leaf, TensorChecks& checks) {
  const Tensor& tensor = leaf.value.as_tensor();
  Checked checked;
  for (const Piece& piece : tensor.pieces) {
    if (!checks.claims.is_first(*piece.storage)) continue;
    const Piece raw = decoded_piece(tensor, piece, leaf.name);
    if (checks.leave(*raw.storage)) continue;
    const bool has_checksum = check_storage(*raw.storage, leaf.name);
    checked.add(path_of(*raw.storage), has_checksum ? CheckedBy::crc32 : CheckedBy::nothing,
                raw.storage->size);
  }
  return checked;
}

// Whether no other rank holds a part of it.
bool is_here(const Tensor& tensor) {
  return std::ranges::all_of(tensor.pieces,
                             [](const Piece& piece) { return piece.storage != nullptr; });
}

// The tensors inside tuples and objects, and those that are attributes of tensors.
std::vector<Leaf> inner_tensors_of(const Checkpoint& checkpoint) {
  std::vector<Leaf> tensors;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!holds_others(leaf.value)) continue;
    for (const InnerTensor& inner : inner_tensors(leaf.value)) {
      if (is_here(inner.tensor->as_tensor()))
        tensors.push_back({leaf.name + inner.path, {}, *inner.tensor});
    }
  }
  return tensors;
}

// Whether the file is one rank's own, of which a checkpoint may keep another rank's values: where
// they are the same, as far as checksums tell, or where each rank has its own.
bool is_of_one_rank(const Checkpoint& checkpoint, const ObjectInfo& file) {
  const bool is_torch_file = kind_of_file_name(file.name) == CheckpointKind::torch_file;
  return (is_torch_file &&
          is_one_of(checkpoint.kind, CheckpointKind::olmo_legacy, CheckpointKind::rank_files)) ||
         rank_of_own(file.name, std::string(kTrainState)).value_or(0) > 0;
}

// Where storages begin that are checked already: in which source, and at which byte of it.
using Places = std::set<std::pair<std::string, std::uint64_t>>;

void add_places(const Leaf& leaf, Places& places) {
  for (const Piece& piece : leaf.value.as_tensor().pieces) {
    if (piece.storage && piece.storage->source)
      places.emplace(piece.storage->source->name(), piece.storage->offset);
  }
}

// The tensors of a rank's file that are not among `known`.
Checked check_rank_file(const Checkpoint& checkpoint, const ObjectInfo& file, const Places& known,
                        const NamedFiles& named) {
  torch_file::ReadOptions how;
  how.skip_shard_lists = true;
  const Value tree =
      Value::list({torch_file::read(std::make_shared<LazySource>(checkpoint.store, file), how)});
  Checked all;
  TensorChecks checks{named};  // of storages that end with this tree
  for (const InnerTensor& inner : inner_tensors(tree)) {
    const Leaf leaf{file.name + inner.path, {}, *inner.tensor};
    Places places;
    add_places(leaf, places);
    if (std::ranges::includes(known, places)) continue;
    all.add(check_tensor(leaf, checks));
  }
  return all;
}

// One for each missing file that leaves lie in. These are taken away: there is nothing to check.
std::vector<Finding> take_missing(Checkpoint& checkpoint) {
  std::map<std::string, Named> lost;
  std::erase_if(checkpoint.leaves, [&](const Leaf& leaf) {
    const std::vector<std::string> files = missing_files(leaf.value, checkpoint.store->name());
    for (const std::string& file : files) lost[file].add(printable(leaf.name, 200));
    return !files.empty();
  });
  std::vector<Finding> findings;
  for (const auto& [file, names] : lost) {
    findings.emplace_back(
        Error(ErrorCode::incomplete, "the file is missing, and with it " + names.text())
            .at_path(checkpoint.store->name() + "/" + file));
  }
  return findings;
}

// Indices of sets whose total is not that of their tensors.
std::vector<Finding> faults_of_indices(const Checkpoint& checkpoint) {
  std::vector<Finding> faults;
  if (lacks_files(checkpoint)) return faults;  // nobody knows the bytes of what is missing
  for (const ObjectInfo& file : checkpoint.files) {
    if (!safetensors::is_index(file.name)) continue;
    const safetensors::Index index = read_set_index(*checkpoint.store, file.name);
    if (auto fault = index_total_fault(index, checkpoint.leaves))
      faults.emplace_back(Error(ErrorCode::corrupt, std::move(*fault)).at_path(file.name));
  }
  return faults;
}

// The checkpoint's tensors, and those inside of its values.
std::vector<const Leaf*> tensors_of(const Checkpoint& checkpoint, const std::vector<Leaf>& inner) {
  std::vector<const Leaf*> tensors;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (leaf.value.is(Value::Kind::tensor)) tensors.push_back(&leaf);
  }
  for (const Leaf& leaf : inner) tensors.push_back(&leaf);
  return tensors;
}

// The bytes that there are to read: of checked files all of it, otherwise the tensors; and once
// more those that have digests.
std::uint64_t bytes_to_read(const std::vector<FilePart>& parts, const NamedFiles& named,
                            const Checkpoint& checkpoint, const SavedState& saved) {
  const bool by_tensor = parts.empty() && named.empty();
  std::uint64_t total =
      by_tensor ? tensor_bytes(checkpoint.leaves) + bytes_of(checkpoint.replicas) : 0;
  for (const auto& [name, file] : named) total += file.source->size();
  for (const FilePart& part : parts) total += part.end - part.begin;
  for (const DigestedTensor& tensor : saved.tensors) {
    const Tensor& stored = tensor.leaf.value.as_tensor();
    total += byte_size(stored.dtype, stored.shape);
  }
  return total;
}

// One thing to do, and what came of it.
struct Work {
  std::function<Checked()> run;
  std::optional<Error> failed = {};
};

std::vector<Work> work_of(const Checkpoint& checkpoint, const std::vector<FilePart>& parts,
                          const std::vector<const Leaf*>& tensors, TensorChecks& checks) {
  std::vector<Work> all;
  for (const FilePart& part : parts) all.push_back({[&part] { return check_part(part); }});
  for (const Leaf* leaf : tensors)
    all.push_back({[leaf, &checks] { return check_tensor(*leaf, checks); }});
  for (const Leaf& replica : checkpoint.replicas) {
    all.push_back({[&] {
      Checked checked = check_tensor(replica, checks);
      require_same_copies(checkpoint, replica);
      return checked;
    }});
  }
  return all;
}

void add_rank_files(const Checkpoint& checkpoint, const Places& known, const NamedFiles& named,
                    std::vector<Work>& all) {
  for (const ObjectInfo& file : checkpoint.files) {
    if (is_of_one_rank(checkpoint, file))
      all.push_back({[&] { return check_rank_file(checkpoint, file, known, named); }});
  }
}

void add_named(const NamedFiles& named, const std::stop_token& stop, std::vector<Work>& all) {
  for (const auto& [name, file] : named) {
    all.push_back({[&file = file, stop] {
      Checked checked;
      checked.add(file.source->name(), file.by(), require_name(file, stop));
      return checked;
    }});
  }
}

// Puts together what was checked.
class FilesChecked {
 public:
  // From any thread.
  void add(const Checked& checked) {
    const std::lock_guard lock(mutex_);
    for (const CheckedBytes& one : checked.files) bytes_[{one.file, one.by}] += one.bytes;
  }
  void fill(VerifyReport& report) const {
    for (const auto& [file, bytes] : bytes_) {
      report.files.push_back({file.first, file.second, bytes});
      (file.second == CheckedBy::nothing ? report.bytes_unchecked : report.bytes) += bytes;
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, CheckedBy>, std::uint64_t> bytes_;  // guarded by mutex_
};

// The same for all that comes by one place of a file, whatever it was read for.
std::string cause_of(const Error& error) {
  if (!error.offset()) return error.what();
  return error.path() + '\0' + std::to_string(*error.offset()) + '\0' + error.message();
}

// What is wrong with a file's tail keeps all of them from reading.
void add_findings(const std::vector<Work>& all, VerifyReport& report) {
  std::unordered_set<std::string> causes;
  for (const Work& work : all) {
    if (work.failed && causes.insert(cause_of(*work.failed)).second)
      report.findings.emplace_back(*work.failed);
  }
}

void add_work(const SavedState& saved, const std::stop_token& stop, std::vector<Work>& all) {
  for (const DigestedTensor& tensor : saved.tensors)
    all.push_back({[&tensor, stop] { return Checked{{}, require_digest(tensor, stop)}; }});
}

// `saved`: empty for a part of a checkpoint, and for one without digests of a state.
VerifyReport verify_with(const SavedState& saved, const Checkpoint& checkpoint,
                         const VerifyOptions& options) {
  require_going_on(options.stop);
  const HeedStop heeding(options.stop);
  require_threads(options.threads);
  VerifyReport report;
  report.findings = faults_of_indices(checkpoint);
  const std::vector<Leaf> inner = inner_tensors_of(checkpoint);
  const std::vector<const Leaf*> tensors = tensors_of(checkpoint, inner);
  report.tensors = tensors.size() - inner.size();
  report.inner_tensors = inner.size();
  if (!options.read_data) return report;
  NamedFiles named;
  for (NamedFile& file : named_files(checkpoint))
    named.emplace(file.source->name(), std::move(file));
  const std::vector<FilePart> parts = checked_parts(checkpoint, named);
  Meter meter(options.progress, bytes_to_read(parts, named, checkpoint, saved), options.stop);
  TensorChecks checks{named};
  FilesChecked files;
  std::vector<Work> all = work_of(checkpoint, parts, tensors, checks);
  Places known;
  for (const Leaf* leaf : tensors) add_places(*leaf, known);
  for (const Leaf& leaf : checkpoint.replicas) add_places(leaf, known);
  add_rank_files(checkpoint, known, named, all);
  add_named(named, options.stop, all);
  add_work(saved, options.stop, all);
  parallel_for(options.threads, all.size(), [&](std::size_t i) {
    Checked checked;
    try {
      checked = all[i].run();
    } catch (const Error& error) {
      all[i].failed = error;
    }
    meter.add(checked.bytes());
    files.add(checked);
  });
  files.fill(report);
  report.findings.insert(report.findings.end(), saved.findings.begin(), saved.findings.end());
  add_findings(all, report);
  meter.finish();
  return report;
}

VerifyReport verify_what_is_there(const SavedState& saved, const Checkpoint& checkpoint,
                                  const VerifyOptions& options) {
  if (!lacks_files(checkpoint)) return verify_with(saved, checkpoint, options);
  Checkpoint there = checkpoint;
  std::vector<Finding> findings = take_missing(there);
  VerifyReport report = verify_with(saved, there, options);
  report.findings.insert(report.findings.begin(), findings.begin(), findings.end());
  return report;
}

}  // namespace

std::string_view to_string(CheckedBy by) noexcept {
  constexpr std::array<std::string_view, 5> kNames{"digests", "crc32", "sha256", "git_sha1",
                                                   "nothing"};
  return kNames[static_cast<std::size_t>(by)];
}

const Error* VerifyReport::obstacle() const noexcept {
  if (findings.empty()) return nullptr;
  // Parts that a checkpoint lacks are `incomplete`.
  const bool is_absent = findings.size() == 1 && findings[0].code == ErrorCode::not_found;
  const bool is_shut = std::ranges::all_of(findings, [](const Finding& finding) {
    return is_one_of(finding.code, ErrorCode::io, ErrorCode::timeout);
  });
  return is_absent || is_shut ? &findings.front().error : nullptr;
}

VerifyReport verify(const Location& where, const VerifyOptions& options) {
  require_threads(options.threads);
  (void)directory_store(where);  // a URL of no store is a mistake, no finding
  try {
    // What belongs to no state dict is checked, too.
    const Checkpoint checkpoint = open_as_pickled(where, options.open);
    const bool is_state = options.read_data && is_olmo_kind(checkpoint.kind);
    return verify_what_is_there(is_state ? saved_state_of(checkpoint) : SavedState(), checkpoint,
                                options);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) throw;
    VerifyReport report;
    report.findings.emplace_back(error);
    return report;
  }
}

VerifyReport verify(const Checkpoint& checkpoint, const VerifyOptions& options) {
  return verify_what_is_there({}, checkpoint, options);
}

namespace {

// One part of a file to digest: whole blocks, and the end.

bool is_read_checked(const Piece& piece) {
  return piece.storage && piece.storage->source && piece.storage->source->checked();
}

bool has_digests(const NamedTensor& named) {
  return std::ranges::all_of(named.tensor.as_tensor().pieces, is_read_checked);
}

bool is_checked(const Checkpoint& checkpoint) {
  const auto is_guarded = [&](const ObjectInfo& file) {
    return checkpoint.store->open(file.name)->checked();
  };
  if (std::ranges::all_of(checkpoint.files, is_guarded)) return true;
  return checkpoint.kind == CheckpointKind::safetensors && !checkpoint.leaves.empty() &&
         std::ranges::all_of(all_tensors(checkpoint.leaves), has_digests);
}

FileDigests digest_file(const ByteSource& source, int threads, Meter& meter) {
  BlockDigests blocks;
  const std::uint64_t size = source.size();
  parallel_for(threads, static_cast<std::size_t>((size + kPart - 1) / kPart), [&](std::size_t i) {
    std::vector<std::byte> window(static_cast<std::size_t>(kDigestBlock));
    const std::uint64_t begin = i * kPart;
    for (std::uint64_t at = begin; at < std::min(begin + kPart, size); at += kDigestBlock) {
      const auto bytes = MutableByteView(window).first(
          static_cast<std::size_t>(std::min(kDigestBlock, size - at)));
      source.read_at(at, bytes);
      blocks.add(at, bytes);
      meter.add(bytes.size());
    }
  });
  return {size, blocks.finish(size), 0};
}

bool is_directory(const std::string& path) {
  const Location where = located_source(path);
  std::error_code none;
  return where.store ? where.name.empty() : std::filesystem::is_directory(where.path, none);
}

// The name of the side file that readers of this checkpoint look for.
std::string side_file_of(const Checkpoint& checkpoint, const std::string& path, std::string& id) {
  // Saves without collectives have no `.metadata` and no id of the whole: the directory's file.
  if (checkpoint.kind == CheckpointKind::dcp && checkpoint.store->exists(kDcpMetadata)) {
    id = save_id_of(*checkpoint.store, read_dcp_metadata(*checkpoint.store));
    return side_file_name(id);
  }
  if (is_directory(path)) return std::string(kDirectorySideFile);
  return checkpoint.files.at(0).name + std::string(kSideFileSuffix);
}

void require_undamaged(const Checkpoint& checkpoint, const SealOptions& options) {
  const VerifyReport found = verify(
      checkpoint, {.threads = options.threads, .progress = options.progress, .stop = options.stop});
  if (!found.findings.empty())
    throw Error(found.findings[0].code, "damage is not sealed: " + found.findings[0].text);
}

OpenOptions how_to_seal(const SealOptions& options) {
  if (options.open.partial || options.open.rank) {
    throw Error(ErrorCode::invalid_argument,
                "digests are of all files of a checkpoint: the options partial and rank have no "
                "place here");
  }
  OpenOptions how = options.open;
  how.part = true;  // digests are of bytes
  return how;
}

std::uint64_t bytes_of(const std::vector<ObjectInfo>& files) {
  std::uint64_t bytes = 0;
  for (const ObjectInfo& file : files) bytes += file.size;
  return bytes;
}

}  // namespace

SealReport seal(const std::string& path, const SealOptions& options) {
  const Checkpoint checkpoint = open_as_pickled(path, how_to_seal(options));
  SealReport report;
  report.was_sealed = is_checked(checkpoint);
  if (!report.was_sealed) {
    for (const ObjectInfo& file : checkpoint.files) require_side_file_can_name(file.name);
  }
  require_undamaged(checkpoint, options);
  report.files = checkpoint.files.size();
  report.bytes = bytes_of(checkpoint.files);
  SideFile side_file;
  const std::string name = side_file_of(checkpoint, path, side_file.save_id);
  if (!report.was_sealed || checkpoint.store->exists(name))
    report.side_file = checkpoint.store->name() + "/" + name;
  if (report.was_sealed) return report;
  side_file.producer = own_producer();
  // A side file that lacks a file's digests may know the types of the tree, which nobody else does.
  if (checkpoint.has_types && is_side_file_name(name) && checkpoint.store->exists(name))
    side_file.types = read_side_file(*checkpoint.store, name).types;
  Meter meter(options.progress, report.bytes, options.stop);
  for (const ObjectInfo& file : checkpoint.files) {
    side_file.files[file.name] =
        digest_file(*checkpoint.store->open(file.name), options.threads, meter);
  }
  require_going_on(options.stop);
  const std::string text = encode_side_file(side_file);
  put(*checkpoint.store, name, std::as_bytes(std::span(text.data(), text.size())),
      IfExists::replace);
  meter.finish();
  return report;
}

}  // namespace tessera
