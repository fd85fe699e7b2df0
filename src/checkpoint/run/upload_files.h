// Copies one object from a store to another one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/run/upload.h"
#include "tessera/storage.h"

namespace tessera {

// An object that is written and not yet visible.
struct WrittenObject {
  std::string name;
  std::unique_ptr<ByteSink> sink;
  std::uint64_t size = 0;    // bytes
  std::uint64_t digest = 0;  // of all its bytes
};

// Writes all bytes of `source` into a new object of `to`, in windows of 8 MiB, which S3 takes as
// they are. `meter` hears of them and may end it.
[[nodiscard]] WrittenObject write_copy(const ByteSource& source, Store& to, const std::string& name,
                                       IfExists if_exists, Meter& meter);
// Whether the object `name` of `to` is a copy of `source`. What has digests is compared with these,
// and `source` not read. `meter` may end it.
[[nodiscard]] bool has_copy(const Store& to, const std::string& name, const ByteSource& source,
                            const std::optional<FileDigests>& digests, const Meter& meter);
// Makes it visible. Throws `incomplete` if the store then has it with another size and, with
// `read_back`, `corrupt` if it gives other bytes.
void commit_copy(WrittenObject& written, Store& to, bool read_back);

// The files of a checkpoint that is copied elsewhere.

// A directory as this rank sees it: with all of its files, or with some.
class UploadSource {
 public:
  explicit UploadSource(std::shared_ptr<Store> store)
      : store_(std::move(store)), files_(store_->list()) {}

  // Sorted by name; with what killed saves and replaced checkpoints left.
  [[nodiscard]] const std::vector<ObjectInfo>& files() const noexcept { return files_; }
  // What the metadata says of them. One rank reads it for all. Throws `io` if a directory is closed
  // to it in which the checkpoint's files may be.
  [[nodiscard]] KnownFiles look() const;
  // Throws `conflict` if the file's size has changed.
  [[nodiscard]] std::shared_ptr<ByteSource> open(const UploadFile& file) const;
  // What is read is compared with the digests that there are.
  [[nodiscard]] static std::shared_ptr<ByteSource> guarded(std::shared_ptr<ByteSource> source,
                                                           const UploadFile& file);
  // The last bytes of a file as it is now. A save's id is among those of `.metadata`.
  [[nodiscard]] std::vector<std::byte> end_of(const ObjectInfo& file) const;
  [[nodiscard]] const std::string& name() const { return store_->name(); }

 private:
  std::shared_ptr<Store> store_;
  std::vector<ObjectInfo> files_;
};

// The directory that a checkpoint is copied to.

// On rank 0. `plan` must outlive it.
class UploadTarget {
 public:
  UploadTarget(Store& store, const UploadPlan& plan) : store_(store), plan_(plan) {}

  // Looks at what is there, and removes the markers. Throws `already_exists` unless `overwrite`.
  void open(bool overwrite);
  // Instead, if what is there has the markers of the plan: they stay.
  void open_same(bool overwrite);
  // Removes what is of a checkpoint and not of the new one. After open().
  void remove_stale();
  // Throws `incomplete` unless all data of the plan is there with its size.
  void require_data() const;
  // After a failure: removes all that the plan has, unless there is a marker.
  void withdraw() noexcept;

 private:
  // Notes what is stale, and returns the markers. Throws `already_exists` unless `overwrite`.
  [[nodiscard]] std::vector<ObjectInfo> look(bool overwrite);

  Store& store_;
  const UploadPlan& plan_;
  std::vector<std::string> stale_;
};

// Removes what a rank has copied before the upload failed.
void withdraw(Store& store, const UploadPlan& plan, int rank) noexcept;

}  // namespace tessera
