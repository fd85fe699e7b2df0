// Compares tensors bit for bit.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/value.h"

namespace tessera {

[[nodiscard]] bool same_form(const Tensor& a, const Tensor& b);  // shape and dtype

// Whether both have one shape, one dtype and the same bytes: by the checksums of their storages
// where these have one and the tensors lie in them alike, else by reading. `name` is for errors of
// reading.
[[nodiscard]] bool same_elements(const Tensor& a, const Tensor& b, const std::string& name);

// Compares recorded checksums of storages with what a job reads of them, part by part.

// Bytes of a storage that were read one after the other, and their CRC-32.
struct ReadRun {
  std::uint64_t at = 0;  // of the storage
  std::uint64_t size = 0;
  std::uint32_t crc = 0;

  [[nodiscard]] std::uint64_t end() const { return at + size; }
};

// What was read of a storage whose checksum could not be compared yet, as StorageChecks::add has
// it.
struct OpenCheck {
  const Storage* stored = nullptr;
  std::shared_ptr<Storage> raw;
  std::vector<ReadRun> runs;
  std::string key;
};

// Whether the storage has a checksum to compare with. A recorded 0 means that the writer did not
// compute one.
[[nodiscard]] bool has_crc(const Storage& storage);

// The place of the storage's bytes, for errors: a file's name, a device, or "memory".
[[nodiscard]] std::string path_of(const Storage& storage);

// Throws `corrupt` when `found`, the CRC-32 of all bytes of a storage, is not the recorded one.
// `key`: the tensor's.
void require_crc(const Storage& storage, std::uint32_t found, const std::string& key);

// Reads all bytes of a raw storage and compares their CRC-32 with the recorded one. Returns whether
// there was one to compare with. Throws `cancelled` when `stop` is requested.
bool check_storage(const Storage& storage, const std::string& key,
                   const std::stop_token& stop = {});

// The parts of checksummed storages that the readers of one job have read, in any order and by any
// thread. Checksums of parts that lie end to end are combined, so slices that go to several files
// are checked without a second reading. Used by several threads.
class StorageChecks {
 public:
  // Adds what was read of `raw`. `stored` is the storage of the tensor's piece, which tells
  // storages apart: `raw` itself, or the item that holds it; it must outlive this. No runs: they
  // are too many to follow. Throws `corrupt` when these runs complete the storage and the checksums
  // differ.
  void add(const Storage& stored, const std::shared_ptr<Storage>& raw,
           std::span<const ReadRun> runs, const std::string& key);

  // The storages of which parts are still missing, or overlapped.
  [[nodiscard]] std::vector<OpenCheck> open() const;

  // Reads and compares every storage of which parts are still missing, or overlapped. Afterwards no
  // storage that `add` has seen is unchecked. Returns what was read. To be called once, before what
  // the job wrote is made visible.
  IoReport read_rest(int threads, const std::stop_token& stop = {});

 private:
  struct Parts {
    std::shared_ptr<Storage> raw;           // null: compared
    std::string key;                        // of a tensor, for errors
    std::map<std::uint64_t, ReadRun> runs;  // by their begin; neighbours are one
    bool whole = false;                     // only reading it whole can tell
  };

  mutable std::mutex mutex_;
  std::unordered_map<const Storage*, Parts> parts_;  // guarded by mutex_
};

}  // namespace tessera
