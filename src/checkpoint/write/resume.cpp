#include "checkpoint/write/resume.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <span>
#include <utility>

#include "base/crc32.h"
#include "base/digest.h"
#include "base/process.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/place.h"
#include "checkpoint/write/journal.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = ".resume";
constexpr std::size_t kLongestName = 255;  // what Linux file systems take
// Runs of open checks that one unit's line may list: a unit with more is made again.
constexpr std::size_t kMaxRuns = 256;

std::string file_path(const Destination& destination) {
  return destination.directory + "/" + destination.file;
}

// Beside the target, under a name that a later run finds; of a directory that may hold other things
// already, and may be on a file system of its own, inside.
std::string work_path(const Destination& destination) {
  if (destination.publishing == Publishing::marker)
    return destination.directory + "/" + std::string(kMark);
  const fs::path path(destination.publishing == Publishing::file
                          ? file_path(destination)
                          : without_slashes(destination.directory));
  const std::string name = path.filename().string().substr(0, kLongestName - 1 - kMark.size());
  return directory_of(path) + "/." + name + std::string(kMark);
}

// Follows what a unit's maker writes, which must come in order.
class FollowedSink final : public ByteSink {
 public:
  FollowedSink(ByteSink& sink, std::uint64_t at) : sink_(sink), next_(at) {}

  void write_at(std::uint64_t offset, ByteView bytes) override {
    in_order_ = in_order_ && offset == next_;
    next_ += bytes.size();
    digest_.add(bytes);
    sink_.write_at(offset, bytes);
  }
  void commit() override { sink_.commit(); }
  [[nodiscard]] const std::string& name() const override { return sink_.name(); }

  // The digest of what came, when that is all up to `end`.
  [[nodiscard]] std::optional<std::uint64_t> digest(std::uint64_t end) const {
    if (!in_order_ || next_ != end) return std::nullopt;
    return digest_.value();
  }

 private:
  ByteSink& sink_;
  std::uint64_t next_;
  bool in_order_ = true;
  RunningDigest digest_;
};

std::uint64_t text_digest(std::string_view text) {
  return digest64(std::as_bytes(std::span(text)));
}

// Fills `out` from byte `at` of the file. False: it cannot be read that far.
bool read_whole(int fd, std::uint64_t at, MutableByteView out) {
  while (!out.empty()) {
    const ssize_t got =
        uninterrupted([&] { return ::pread(fd, out.data(), out.size(), static_cast<off_t>(at)); });
    if (got <= 0) return false;
    out = out.subspan(static_cast<std::size_t>(got));
    at += static_cast<std::uint64_t>(got);
  }
  return true;
}

// Calls `visit` with the unit's bytes in the file, window by window: a unit that fits into the
// window is in it afterwards. False: what cannot be read is made again.
template <typename Visit>
bool read_left(const std::string& path, const JournalUnit& unit, MutableByteView window,
               Visit visit) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd) return false;
  for (std::uint64_t done = 0; done < unit.size;) {
    const auto part = window.first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), unit.size - done)));
    if (!read_whole(fd.get(), unit.at + done, part)) return false;
    visit(unit.at + done, ByteView(part));
    done += part.size();
  }
  return true;
}

// Whether an earlier run left what is to be made now.
bool is_left(const JournalUnit* left, const JournalUnit& made) {
  return left != nullptr && left->what == made.what && left->size == made.size;
}

}  // namespace

Resumption::Resumption(const Checkpoint& source, const std::vector<Leaf>& leaves,
                       Destination destination, const ConvertOptions& options)
    : destination_(std::move(destination)),
      if_exists_(options.overwrite ? IfExists::replace : IfExists::fail),
      work_(work_path(destination_)),
      journal_(work_.journal(), work_.path() + "/journal",
               fingerprint_of(source, leaves, file_path(destination_), options), random_attempt()),
      store_(work_.content()) {
  number_storages(leaves);
  has_units_ = journal_.has_units();
  finished_ = journal_.published() && journal_.published() == identity_in(destination_.directory);
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

// Of a file, or of a directory that gets its marker.
void Resumption::require_room() const {
  if (if_exists_ == IfExists::replace) return;
  if (destination_.publishing == Publishing::marker) {
    require_no_checkpoint(*posix_store(destination_.directory), destination_.directory);
  } else if (fs::exists(file_path(destination_))) {
    throw Error(ErrorCode::already_exists, "a file is there already")
        .at_path(file_path(destination_));
  }
}

void Resumption::begin() {
  if (!journal_.goes_on()) work_.clear();
  switch (destination_.publishing) {
    case Publishing::file:
      require_room();
      break;
    case Publishing::marker:
      require_room();
      bring_back();
      remove_leftovers(*posix_store(destination_.directory));
      break;
    case Publishing::directory:
      make_directories(work_.content());
      whole_.emplace(destination_.directory, if_exists_, work_.content());
      break;
  }
}

bool Resumption::is_of_attempt(const std::string& name) const {
  return is_attempt_name(name) && name.ends_with("_" + attempt() + ".distcp");
}

// A run that was killed while it moved its data files into place left some there.
void Resumption::bring_back() {
  if (!journal_.goes_on()) return;
  const auto there = posix_store(destination_.directory);
  const std::vector<ObjectInfo> objects = there->list_level();
  const std::set<std::string> own = own_files(*there, objects);
  for (const ObjectInfo& object : objects) {
    if (!is_of_attempt(object.name) || own.contains(object.name)) continue;
    make_directories(work_.content());
    move_into_place(destination_.directory + "/" + object.name, work_.content() + "/" + object.name,
                    IfExists::replace);
  }
}

std::vector<std::string> Resumption::names_in(const std::string& directory) const {
  if (destination_.publishing == Publishing::file) return {destination_.file};
  if (destination_.publishing == Publishing::marker) return {std::string(kDcpMetadata)};
  std::vector<std::string> names;
  const auto store = posix_store(directory);
  const Belonging belongs(*store);
  for (const ObjectInfo& object : store->list()) {
    if (belongs(object.name)) names.push_back(object.name);
  }
  return names;
}

std::optional<std::uint64_t> Resumption::identity_in(const std::string& directory) const {
  return identity_of(directory, names_in(directory));
}

std::string Resumption::file_of(const ByteSink& sink) const {
  return sink.name().substr(work_.content().size() + 1);
}

std::uint32_t Resumption::write(const ConvertJob& job, ByteSink& sink, const FileUnit& unit,
                                const UnitMaker& make) {
  JournalUnit made{file_of(sink), text_digest(unit.what), unit.at, unit.size, 0, 0, {}};
  const JournalUnit* left = journal_.find(made.file, unit.at);
  if (is_left(left, made) && keep(job, sink, *left)) return left->crc;
  FollowedSink followed(sink, unit.at);
  const MadeUnit result = make(followed);
  if (const auto digest = followed.digest(unit.at + unit.size)) {
    made.digest = *digest;
    made.crc = result.crc;
    note(std::move(made), result.open);
  }
  return result.crc;
}

// Writes the unit's line, unless its source could not be checked by a later run.
void Resumption::note(JournalUnit unit, const std::vector<HandedOver>& open) {
  std::size_t runs = 0;
  for (const HandedOver& handed : open) {
    const auto number = numbers_.find(handed.stored);
    if (number == numbers_.end() || handed.runs.empty()) return;
    runs += handed.runs.size();
    unit.open.push_back({number->second, handed.runs});
  }
  if (runs > kMaxRuns) return;
  journal_.append(unit);
  has_units_ = true;
}

// Leaves the unit's bytes in `window` when they fit.
bool Resumption::is_unharmed(const ConvertJob& job, const ByteSink& sink, const JournalUnit& left,
                             MutableByteView window) {
  RunningDigest digest;
  std::uint32_t crc = 0;
  const bool whole = read_left(sink.name(), left, window, [&](std::uint64_t, ByteView bytes) {
    require_going_on(job.meter.stop());
    digest.add(bytes);
    crc = crc32(bytes, crc);
  });
  return whole && digest.value() == left.digest && crc == left.crc;
}

// What the earlier run read of storages that it had not read to the end takes part in their checks.
// False: it speaks of storages that are not there.
bool Resumption::go_on_with_checks(const ConvertJob& job, const JournalUnit& left) {
  for (const OpenCheck& check : left.open) {
    if (check.storage >= storages_.size()) return false;
    const auto& [leaf, index] = storages_[check.storage];
    const Tensor& tensor = leaf->value.as_tensor();
    const Piece& piece = tensor.pieces[index];
    const Piece raw = decoded_piece(tensor, piece, leaf->name);
    job.checks.add(*piece.storage, raw.storage, check.runs, leaf->name);
  }
  return true;
}

bool Resumption::keep(const ConvertJob& job, ByteSink& sink, const JournalUnit& left) {
  std::vector<std::byte> window(std::min<std::uint64_t>(job.window, left.size));
  if (!is_unharmed(job, sink, left, window) || !go_on_with_checks(job, left)) return false;
  const auto follow = [&](std::uint64_t at, ByteView bytes) { sink.keep_at(at, bytes); };
  if (left.size <= window.size()) {
    follow(left.at, window);
  } else if (!read_left(sink.name(), left, window, follow)) {
    throw Error(ErrorCode::io, "what an earlier run left cannot be read a second time")
        .at_path(sink.name())
        .at_offset(left.at);
  }
  bytes_kept_ += left.size;
  job.meter.add(left.size);
  return true;
}

void Resumption::publish() {
  store_.remove_strays();
  if (const auto identity = identity_in(work_.content())) journal_.append_published(*identity);
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
  move_into_place(work_.content() + "/" + name, destination_.directory + "/" + name, if_exists);
}

// Data files first, durable under their names, then what makes them a checkpoint.
void Resumption::publish_marked() {
  for (const ObjectInfo& object : store_.list({})) {
    if (object.name != kDcpMetadata) publish_file(object.name, IfExists::fail);
  }
  publish_file(std::string(kDcpMetadata), if_exists_);
}

void Resumption::failed(bool source_is_damaged) {
  if (source_is_damaged || !has_units_) work_.remove();
}

}  // namespace tessera
