#include "checkpoint/run/upload_files.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "base/digest.h"
#include "base/parallel.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/run/steps.h"
#include "checkpoint/save/data_files.h"
#include "checkpoint/save/place.h"
#include "format/olmo/yaml.h"
#include "storage/forwarding_store.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kUploadWindow = 8 << 20;  // bytes

// Gives all bytes to `take`, one window after another, and returns their digest.
std::uint64_t for_each_window(const ByteSource& source,
                              const std::function<void(std::uint64_t at, ByteView bytes)>& take) {
  RunningDigest digest;
  std::vector<std::byte> window(static_cast<std::size_t>(std::min(kUploadWindow, source.size())));
  for (std::uint64_t at = 0; at < source.size(); at += window.size()) {
    const auto bytes = MutableByteView(window).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), source.size() - at)));
    source.read_at(at, bytes);
    digest.add(bytes);
    take(at, bytes);
  }
  return digest.value();
}

}  // namespace

WrittenObject write_copy(const ByteSource& source, Store& to, const std::string& name,
                         IfExists if_exists, Meter& meter) {
  require_going_on(meter.stop());
  WrittenObject written{name, to.create(name, if_exists, source.size()), source.size()};
  written.digest = for_each_window(source, [&](std::uint64_t at, ByteView bytes) {
    written.sink->write_at(at, bytes);
    meter.add(bytes.size());
  });
  return written;
}

bool has_copy(const Store& to, const std::string& name, const ByteSource& source,
              const std::optional<FileDigests>& digests, const Meter& meter) {
  if (!to.exists(name)) return false;
  std::shared_ptr<ByteSource> there = to.open(name);
  if (there->size() != source.size()) return false;
  const auto go_on = [&](std::uint64_t, ByteView) { require_going_on(meter.stop()); };
  if (!digests) return for_each_window(*there, go_on) == for_each_window(source, go_on);
  try {
    (void)for_each_window(*guarded_source(std::move(there), *digests), go_on);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::corrupt || error.code() == ErrorCode::incomplete) return false;
    throw;
  }
  return true;
}

void commit_copy(WrittenObject& written, Store& to, bool read_back) {
  written.sink->commit();
  const auto there = to.open(written.name);
  if (there->size() != written.size) {
    throw Error(ErrorCode::incomplete, "the target has " + std::to_string(there->size()) + " of " +
                                           std::to_string(written.size) + " bytes")
        .at_path(there->name());
  }
  if (!read_back) return;
  if (for_each_window(*there, [](std::uint64_t, ByteView) {}) != written.digest) {
    throw Error(ErrorCode::corrupt, "the target gives other bytes than were written")
        .at_path(there->name());
  }
}

namespace {

constexpr std::uint64_t kEnd = 4096;  // bytes

// Adds what a DCP directory says of its files, whose names have `prefix` before them.
void add_dcp(const std::shared_ptr<Store>& store, const std::string& prefix, KnownFiles& known) {
  std::vector<std::string> warnings;  // who opened the checkpoint has heard of them
  const dcp::Metadata metadata = read_dcp_metadata(*store);
  const DcpGuard guard = guard_dcp(store, metadata, warnings);
  NearObjects objects(*store);
  for (const std::string& name : named_files(metadata)) (void)objects.find(name);  // or its error
  for (const auto& [name, digests] : *guard.digests) known.digests[prefix + name] = digests;
  for (const std::string& name : known_leftovers(*store, present_in(*store)))
    known.leftovers.insert(prefix + name);
}

void require_size(const ByteSource& source, const ObjectInfo& file) {
  if (source.size() == file.size) return;
  throw Error(ErrorCode::conflict, "the file has " + std::to_string(source.size()) +
                                       " bytes, it had " + std::to_string(file.size) +
                                       " when the upload began")
      .at_path(source.name());
}

}  // namespace

KnownFiles UploadSource::look() const {
  require_own_open(*store_);
  KnownFiles known;
  if (store_->exists(kDcpMetadata)) {
    add_dcp(store_, "", known);
    return known;
  }
  // Without a look at the sizes: other nodes may have the other files.
  if (store_->exists(kDirectorySideFile))
    known.digests = read_side_file(*store_, kDirectorySideFile).files;
  const std::string folder(olmo::kDcpFolder);
  const auto inner = std::make_shared<SubStore>(store_, folder);
  if (inner->exists(kDcpMetadata)) add_dcp(inner, folder + "/", known);
  return known;
}

std::shared_ptr<ByteSource> UploadSource::open(const UploadFile& file) const {
  auto source = store_->open(file.object.name);
  require_size(*source, file.object);
  return source;
}

std::shared_ptr<ByteSource> UploadSource::guarded(std::shared_ptr<ByteSource> source,
                                                  const UploadFile& file) {
  return file.digests ? guarded_source(std::move(source), *file.digests) : source;
}

std::vector<std::byte> UploadSource::end_of(const ObjectInfo& file) const {
  const auto source = store_->open(file.name);
  require_size(*source, file);
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(kEnd, file.size)));
  source->read_at(file.size - bytes.size(), bytes);
  return bytes;
}

namespace {

std::set<std::string> names_of(const UploadPlan& plan) {
  std::set<std::string> names;
  for (const UploadFile& file : plan) names.insert(file.object.name);
  return names;
}

void withdraw_if(Store& store, const UploadPlan& plan, auto is_mine) noexcept {
  const Settling settling;  // also of an upload that was stopped
  try {
    if (!marker_in(store).empty()) return;
  } catch (const Error&) {
    return;  // it does not answer
  }
  for (const UploadFile& file : plan) {
    if (is_mine(file)) remove_quietly(store, file.object.name);
  }
}

}  // namespace

void UploadTarget::open(bool overwrite) {
  if (!overwrite) require_no_marker(store_);
  std::vector<ObjectInfo> markers = look(overwrite);
  sort_markers_last(markers);
  for (auto at = markers.rbegin(); at != markers.rend(); ++at) store_.remove(at->name);
  store_.sync();
}

void UploadTarget::open_same(bool overwrite) {
  (void)look(overwrite);
}

std::vector<ObjectInfo> UploadTarget::look(bool overwrite) {
  const std::set<std::string> planned = names_of(plan_);
  const std::vector<ObjectInfo> objects = store_.list();
  const Belonging belongs(store_, objects);
  std::vector<ObjectInfo> markers;
  for (const ObjectInfo& object : objects) {
    if (is_marker(object.name)) {
      markers.push_back(object);
    } else if (!planned.contains(object.name) && belongs(object.name)) {
      stale_.push_back(object.name);
    }
  }
  if (!stale_.empty() && !overwrite) {
    throw Error(ErrorCode::already_exists,
                "data of another checkpoint is there already: " + stale_.front())
        .at_path(store_.name());
  }
  return markers;
}

void UploadTarget::remove_stale() {
  for (const std::string& name : stale_) store_.remove(name);
}

void UploadTarget::require_data() const {
  std::string missing;
  const bool all = look_again([&] {
    std::map<std::string, std::uint64_t> there;
    for (const ObjectInfo& object : store_.list()) there.emplace(object.name, object.size);
    const auto absent = std::ranges::find_if(plan_, [&](const UploadFile& file) {
      const auto found = there.find(file.object.name);
      return !is_marker(file.object.name) &&
             (found == there.end() || found->second != file.object.size);
    });
    missing = absent == plan_.end() ? "" : absent->object.name;
    return missing.empty();
  });
  if (all) return;
  throw Error(ErrorCode::incomplete,
              "rank 0 does not find what a rank has copied: do the ranks write into different "
              "directories, or to disks of their own?")
      .at_path(store_.name() + "/" + missing);
}

void UploadTarget::withdraw() noexcept {
  withdraw_if(store_, plan_, [](const UploadFile&) { return true; });
}

void withdraw(Store& store, const UploadPlan& plan, int rank) noexcept {
  withdraw_if(store, plan, [rank](const UploadFile& file) { return file.rank == rank; });
}

}  // namespace tessera
