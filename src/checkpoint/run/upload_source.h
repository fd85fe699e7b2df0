// The files of a checkpoint that is copied elsewhere.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/run/upload_plan.h"
#include "tessera/storage.h"

namespace tessera {

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

}  // namespace tessera
