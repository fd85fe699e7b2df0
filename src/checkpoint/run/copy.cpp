#include "tessera/copy.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/run/steps.h"
#include "checkpoint/run/upload.h"
#include "checkpoint/run/upload_files.h"
#include "checkpoint/save/place.h"
#include "storage/posix/system.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

constexpr std::uint64_t kWindow = 8 << 20;  // bytes

bool is_same_file(const Location& a, const Location& b) {
  const std::string first = a.store->name() + "/" + a.name, second = b.store->name() + "/" + b.name;
  std::error_code unknown;
  return first == second || std::filesystem::equivalent(first, second, unknown);
}

// A checkpoint that is one file, and its side file.
class FileCopy {
 public:
  FileCopy(const Place& from, Location to, const CopyOptions& options)
      : from_{from.store, from.object->name},
        to_(std::move(to)),
        options_(options),
        meter_(options.progress, from.object->size, options.stop),
        guarded_(guard_file(from.store, *from.object)),
        source_(guarded_->open(from.object->name)) {
    if (to_.name.empty()) to_.name = from_.name.substr(from_.name.rfind('/') + 1);
  }

  CopyReport run() {
    if (is_same_file(from_, to_)) {
      throw Error(ErrorCode::invalid_argument, "a checkpoint cannot be copied onto itself")
          .at_path(to_string(to_));
    }
    to_.store->require_writable(probe_name(random_attempt()), options_.single_writer);
    // There is no target where its side file cannot be.
    const std::shared_ptr<ByteSource> side =
        from_.store->exists(side_of(from_)) ? side_source() : nullptr;
    copy_data();
    if (side) copy_side_file(*side);
    meter_.finish();
    return report_;
  }

 private:
  // A side file at the target stays only beside the bytes that it is of.
  void copy_data() {
    count(source_->size());
    const bool exists = to_.store->exists(to_.name);
    if (exists && has_copy(*to_.store, to_.name, *source_, {}, meter_)) {
      count_whole(source_->size());
      return;
    }
    if (exists && !options_.overwrite) {
      throw Error(ErrorCode::already_exists, "another file is there already")
          .at_path(to_string(to_));
    }
    to_.store->remove(side_of(to_));
    if (!is_copied_by_store()) write();
    if (options_.read_back && !has_copy(*to_.store, to_.name, *source_, {}, meter_)) {
      throw Error(ErrorCode::corrupt, "the target gives other bytes than were written")
          .at_path(to_string(to_));
    }
  }

  bool is_copied_by_store() {
    const auto copied =
        to_.store->copy({.from = *source_,
                         .name = to_.name,
                         .if_exists = if_exists(),
                         .copied = [this](std::uint64_t bytes) { meter_.add(bytes); }});
    if (copied != StoreCopied::cannot) report_.server_bytes += source_->size();
    return copied != StoreCopied::cannot;
  }

  void write() {
    const std::uint64_t size = source_->size();
    const auto sink = to_.store->create(to_.name, if_exists(), size);
    parallel_for(options_.threads, (size + kWindow - 1) / kWindow, [&](std::size_t i) {
      require_going_on(meter_.stop());
      const std::uint64_t at = i * kWindow;
      std::vector<std::byte> window(static_cast<std::size_t>(std::min(kWindow, size - at)));
      source_->read_at(at, window);
      sink->write_at(at, window);
      meter_.add(window.size());
    });
    require_going_on(meter_.stop());
    sink->commit();
  }

  void copy_side_file(const ByteSource& side) {
    count(side.size());
    Meter silent({}, 0, options_.stop);
    if (has_copy(*to_.store, side_of(to_), side, {}, silent)) return count_whole(side.size());
    auto written = write_copy(side, *to_.store, side_of(to_), IfExists::replace, silent);
    const Settling settling;  // with it the copy is there
    commit_copy(written, *to_.store, options_.read_back);
  }

  // It has the file's name in it, and is that of the file that is open.
  [[nodiscard]] std::shared_ptr<ByteSource> side_source() const {
    std::shared_ptr<ByteSource> as_it_is = from_.store->open(side_of(from_));
    SideFile side = read_side_file(*from_.store, side_of(from_));
    const FileDigests* const known = digests_of(*guarded_, from_.name);
    const auto found = side.files.find(from_.name);
    if (known == nullptr || found == side.files.end() || found->second != *known) {
      throw Error(ErrorCode::conflict, "the file's digests were replaced while it was copied")
          .at_path(as_it_is->name());
    }
    if (from_.name == to_.name) return as_it_is;
    auto entry = side.files.extract(from_.name);
    entry.key() = to_.name;
    side.files.insert(std::move(entry));
    const std::string text = encode_side_file(side);
    const auto bytes = std::as_bytes(std::span(text));
    return memory_source({bytes.begin(), bytes.end()}, side_of(from_));
  }

  static std::string side_of(const Location& file) {
    return file.name + std::string(kSideFileSuffix);
  }
  [[nodiscard]] IfExists if_exists() const {
    return options_.overwrite ? IfExists::replace : IfExists::fail;
  }
  void count(std::uint64_t bytes) {
    ++report_.files;
    report_.bytes += bytes;
  }
  void count_whole(std::uint64_t bytes) {
    ++report_.whole_files;
    report_.whole_bytes += bytes;
  }

  const Location from_;
  Location to_;
  const CopyOptions& options_;
  Meter meter_;
  const std::shared_ptr<Store> guarded_;      // with the digests that there are
  const std::shared_ptr<ByteSource> source_;  // checked by them
  CopyReport report_{.checkpoints = 1};
};

UploadOptions upload_options(const CopyOptions& options) {
  return {.overwrite = options.overwrite,
          .single_writer = options.single_writer,
          .threads = options.threads,
          .resume = true,
          .read_back = options.read_back,
          .progress = options.progress,
          .stop = options.stop};
}

bool has_option(const std::string& option) {
  return is_one_of(option, "--ignore-index", "--accept");
}

// Copies are of bytes, so a checkpoint that this library cannot read is copied all the same, also
// one of which it knows no more than its config: its kind is none then.
std::optional<CheckpointKind> kind_of_whole(const Location& from, const CopyOptions& options) {
  if (!has_known_kind(*directory_store(from))) return std::nullopt;
  try {
    const Checkpoint checkpoint = Checkpoint::open(from, options.open);
    checkpoint.require_files();
    return checkpoint.kind;
  } catch (const Error& error) {
    if (is_one_of(error.code(), ErrorCode::unsupported, ErrorCode::unsafe)) return std::nullopt;
    const Error fact = without_offers(error, has_option);
    if (error.code() != ErrorCode::incomplete || !error.peers().empty()) throw Error(fact);
    throw reworded(fact, fact.message() + "; --allow-incomplete copies what is there");
  }
}

// Of what does not open, by the names of its files.
CheckpointKind kind_of_any(const Location& from, const CopyOptions& options) {
  OpenOptions how = options.open;
  how.partial = how.partial || options.allow_incomplete;
  try {
    return Checkpoint::open(from, how).kind;
  } catch (const Error& error) {
    const bool may_be_copied =
        is_one_of(error.code(), ErrorCode::unsupported, ErrorCode::unsafe, ErrorCode::incomplete);
    const auto kind = may_be_copied ? kind_by_names(*directory_store(from)) : std::nullopt;
    if (!kind) throw without_offers(error, has_option);
    return *kind;
  }
}

UploadReport copied_directory(const Location& from, const Location& to,
                              const CopyOptions& options) {
  const bool is_marked = !marker_in(*directory_store(from)).empty();
  const bool is_any = options.allow_incomplete || options.open.partial;
  const auto whole = is_any ? std::nullopt : kind_of_whole(from, options);
  const bool is_unmarked =
      !is_marked && (!is_marked_kind(whole ? *whole : kind_of_any(from, options)) ||
                     has_parts(deciding_files(*directory_store(from))));
  return is_unmarked ? upload_unmarked(from, to, upload_options(options))
                     : upload(from, to, upload_options(options));
}

CopyReport copy_directory(const Location& from, const Location& to, const CopyOptions& options) {
  const UploadReport report = copied_directory(from, to, options);
  return {.checkpoints = 1,
          .files = report.files,
          .bytes = report.bytes,
          .whole_files = report.whole_files,
          .whole_bytes = report.whole_bytes,
          .server_bytes = report.server_bytes};
}

void add(CopyReport& all, const CopyReport& one) {
  all.checkpoints += one.checkpoints;
  all.files += one.files;
  all.bytes += one.bytes;
  all.whole_files += one.whole_files;
  all.whole_bytes += one.whole_bytes;
  all.server_bytes += one.server_bytes;
}

// Steps that the run has left are left in its copy, too.
void copy_left(const Store& from, const Location& to) {
  LeftLine left = read_left(from);
  if (left.empty()) return;
  const auto store = directory_store(to);
  left.merge(read_left(*store));
  write_left(*store, left);
}

// All that is directly in the run's directory; on a disk links as well, which no store lists.
std::set<std::string> names_in(const Location& run) {
  std::set<std::string> names;
  if (is_on_disk(run)) {
    for (const DirectoryEntry& entry : readable_entries_of(located_directory(run).path))
      names.insert(entry.name);
    return names;
  }
  const auto store = directory_store(run);
  for (const std::string& directory : store->list_directories()) names.insert(directory);
  for (const ObjectInfo& object : store->list_level()) names.insert(object.name);
  return names;
}

// Of a step's directory that is not among those that are copied.
std::string reason_of(const StepDirectory& step) {
  if (step.role == StepDirectory::Role::current) return "it has no marker: it is not finished";
  if (step.role == StepDirectory::Role::attempt) return "it is of a save that did not finish";
  return "it was set aside when " + run_checkpoint_name(step.step, step.unsharded) +
         " was replaced; rename it if it is the one that you want";
}

std::vector<PassedOver> rest_of_run(const Location& run, const std::vector<StepDirectory>& copied) {
  std::map<std::string, std::string> reasons;
  for (const std::string& name : names_in(run))
    if (name != kLeftRecord) reasons[name] = "it is no step";
  for (const StepDirectory& step : step_directories(run)) reasons[step.directory] = reason_of(step);
  for (const StepDirectory& step : copied) reasons.erase(step.directory);
  std::vector<PassedOver> rest;
  for (const auto& [name, reason] : reasons) rest.push_back({name, reason});
  return rest;
}

// `rest`: what is not copied. An error is the first of a damaged checkpoint; what else stays behind
// is in the log then.
CopyReport copy_run(const std::vector<StepDirectory>& steps, const Location& run,
                    const Location& to, const std::vector<PassedOver>& rest,
                    const CopyOptions& options) {
  CopyReport report;
  std::optional<Error> first;  // one that is damaged does not keep the others
  copy_left(*directory_store(run), to);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string name = run_checkpoint_name(step->step, step->unsharded);
    try {
      add(report,
          copy_directory(directory_in(run, step->directory), directory_in(to, name), options));
    } catch (const Error& error) {
      if (!is_one_of(error.code(), ErrorCode::incomplete, ErrorCode::corrupt)) throw;
      if (first) log(LogLevel::warning, step->directory + " is not copied: " + error.what());
      if (!first) first = error;
    }
  }
  report.passed_over = rest;
  if (!first) return report;
  for (const PassedOver& one : rest)
    log(LogLevel::warning, one.name + " is not copied: " + one.reason);
  throw Error(*first);
}

// The file that is to be there. A link stays, and leads to it.
Location file_at(const Location& to) {
  return located_file(is_on_disk(to) ? Location(end_of_links(without_file_scheme(to.path))) : to);
}

// Where a directory is, whatever links lead there; of a store its place in there.
std::string place_name(const Location& where) {
  if (where.store) return where.name;
  if (!is_on_disk(where)) return directory_store(where)->name();
  return followed_path(where.path);
}

void require_used(const OpenOptions& options, const Place& place) {
  if (options.rank) {
    throw Error(ErrorCode::invalid_argument,
                "files of all ranks are copied: the option rank has no place here");
  }
  if (place.object && (options.ignore_index || !options.accept.empty())) {
    throw Error(ErrorCode::invalid_argument,
                "a file is copied as it is: the options ignore_index and accept have no effect")
        .at_path(place.store->name() + "/" + place.object->name);
  }
}

// Each copy would be a part of the next one.
void require_outside(const Location& to, const Location& from) {
  if (to.store != from.store) return;  // one name may be of two stores
  std::string outer = place_name(from);
  if (!outer.empty() && !outer.ends_with('/')) outer += '/';
  const std::string inner = place_name(to);
  if (inner.empty() || !inner.starts_with(outer)) return;
  throw Error(ErrorCode::invalid_argument, "the target lies in the directory that is to be copied")
      .at_path(to_string(to));
}

}  // namespace

CopyReport copy(const Location& from, const Location& to, const CopyOptions& options) {
  require_threads(options.threads);
  require_going_on(options.stop);
  const HeedStop heeding(options.stop);
  await_saves(from, Looks::at_run, options.stop);  // or a checkpoint's own place
  Place place = place_of(from);
  require_used(options.open, place);
  // A store's own sources, which it can copy by itself, not those of a snapshot.
  if (!from.store && !is_on_disk(from))
    place.store = place.object ? located_file(from).store : directory_store(from);
  if (place.object) return FileCopy(place, file_at(to), options).run();
  require_outside(to, from);
  const Location directory(place.store);
  const std::vector<StepDirectory> steps = marked(directory, standing(step_directories(directory)));
  if (steps.empty()) return copy_directory(directory, to, options);
  return copy_run(steps, directory, to, rest_of_run(is_on_disk(from) ? from : directory, steps),
                  options);
}

}  // namespace tessera
