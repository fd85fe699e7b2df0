#include "checkpoint/read/storage_checks.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/crc32.h"
#include "base/parallel.h"
#include "checkpoint/read/reader.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

// Whether both are the same views of whole storages with one checksum. 0: the file has none.
bool same_checksum(const Piece& a, const Piece& b) {
  const Storage& x = *a.storage;
  const Storage& y = *b.storage;
  return x.size == y.size && a.storage_offset == b.storage_offset && a.strides == b.strides &&
         x.crc32.value_or(0) != 0 && x.crc32 == y.crc32;
}

bool same_bytes(const Tensor& a, const Tensor& b, const std::string& name) {
  constexpr std::int64_t kWindow = 64 << 10;  // elements
  const std::size_t size = size_of(a.dtype);
  const Slice all = whole(a.shape);
  TensorReader left(a, name);
  TensorReader right(b, name);
  std::vector<std::byte> bytes[2];
  for (std::int64_t at = 0; at < numel(a.shape); at += kWindow) {
    const std::int64_t count = std::min(kWindow, numel(a.shape) - at);
    for (auto& half : bytes) half.resize(static_cast<std::size_t>(count) * size);
    left.read(all, at, count, bytes[0].data());
    right.read(all, at, count, bytes[1].data());
    if (bytes[0] != bytes[1]) return false;
  }
  return true;
}

}  // namespace

bool same_form(const Tensor& a, const Tensor& b) {
  return a.shape == b.shape && a.dtype == b.dtype;
}

bool same_elements(const Tensor& a, const Tensor& b, const std::string& name) {
  if (!same_form(a, b)) return false;
  return same_checksum(a.pieces.at(0), b.pieces.at(0)) || same_bytes(a, b, name);
}

namespace {

constexpr std::size_t kWindow = 1 << 20;
// Runs of one storage that are kept: beyond these, reading it again costs less than following it.
constexpr std::size_t kMaxRuns = 4096;

using Runs = std::map<std::uint64_t, ReadRun>;

void join(ReadRun& first, const ReadRun& second) {
  first.crc = crc32_combine(first.crc, second.crc, second.size);
  first.size += second.size;
}

bool overlaps(const Runs& runs, const ReadRun& run) {
  const auto next = runs.lower_bound(run.at);
  return (next != runs.end() && next->first < run.end()) ||
         (next != runs.begin() && std::prev(next)->second.end() > run.at);
}

// Adds a run and joins it with its neighbours. False: some of its bytes are there already.
bool insert(Runs& runs, const ReadRun& run) {
  if (overlaps(runs, run)) return false;
  ReadRun whole = run;
  auto next = runs.lower_bound(run.at);
  if (next != runs.end() && next->first == run.end()) {
    join(whole, next->second);
    next = runs.erase(next);
  }
  if (next != runs.begin() && std::prev(next)->second.end() == run.at) {
    join(std::prev(next)->second, whole);
  } else {
    runs.emplace(whole.at, whole);
  }
  return true;
}

// Whether `runs` still tell what was read once these are among them.
bool insert_all(Runs& runs, std::span<const ReadRun> added) {
  return !added.empty() &&
         std::ranges::all_of(added, [&](const ReadRun& run) { return insert(runs, run); }) &&
         runs.size() <= kMaxRuns;
}

}  // namespace

bool has_crc(const Storage& storage) {
  return storage.crc32 && *storage.crc32 != 0;
}

std::string path_of(const Storage& storage) {
  if (storage.source) return storage.source->name();
  return storage.device ? storage.device->device() : "memory";
}

void require_crc(const Storage& storage, std::uint32_t found, const std::string& key) {
  if (found == *storage.crc32) return;
  throw Error(ErrorCode::corrupt, "the tensor's bytes have CRC-32 " + std::to_string(found) +
                                      ", the file records " + std::to_string(*storage.crc32))
      .at_path(path_of(storage))
      .at_key(key)
      .at_offset(storage.offset);
}

bool check_storage(const Storage& storage, const std::string& key, const std::stop_token& stop) {
  std::vector<std::byte> window(std::min<std::uint64_t>(kWindow, storage.size));
  StorageReader reader(storage);
  std::uint32_t crc = 0;
  for (std::uint64_t at = 0; at < storage.size; at += window.size()) {
    require_going_on(stop);
    const auto part = std::min<std::uint64_t>(window.size(), storage.size - at);
    crc = tessera::crc32(reader.view(at, MutableByteView(window).first(part)), crc);
  }
  if (!has_crc(storage)) return false;
  require_crc(storage, crc, key);
  return true;
}

void StorageChecks::add(const Storage& stored, const std::shared_ptr<Storage>& raw,
                        std::span<const ReadRun> runs, const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = parts_.try_emplace(&stored);
  Parts& parts = at->second;
  if (is_new) {
    parts.raw = raw;
    parts.key = key;
  }
  if (!parts.raw || parts.whole) return;
  parts.whole = !insert_all(parts.runs, runs);
  if (parts.whole) {
    parts.runs.clear();
    return;
  }
  const ReadRun& first = parts.runs.begin()->second;
  if (first.size != raw->size) return;
  require_crc(*raw, first.crc, key);
  parts = {};
}

std::vector<OpenCheck> StorageChecks::open() const {
  const std::lock_guard lock(mutex_);
  std::vector<OpenCheck> open;
  for (const auto& [stored, parts] : parts_) {
    if (!parts.raw) continue;
    auto& runs = open.emplace_back(OpenCheck{stored, parts.raw, {}, parts.key}).runs;
    for (const auto& [at, run] : parts.runs) runs.push_back(run);
  }
  return open;
}

IoReport StorageChecks::read_rest(int threads, const std::stop_token& stop) {
  const std::lock_guard lock(mutex_);
  std::vector<const Parts*> rest;
  IoReport report;
  for (const auto& [stored, parts] : parts_) {
    if (!parts.raw) continue;
    rest.push_back(&parts);
    report.bytes_read += parts.raw->size;
  }
  parallel_for(threads, rest.size(),
               [&](std::size_t i) { check_storage(*rest[i]->raw, rest[i]->key, stop); });
  parts_.clear();
  return report;
}

}  // namespace tessera
