// The files of a checkpoint that is copied elsewhere.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// A directory as this rank sees it: with all of its files, or with some.
class UploadSource {
 public:
  explicit UploadSource(std::shared_ptr<Store> store);

  // Sorted by name, without what killed saves and replaced checkpoints left.
  [[nodiscard]] const std::vector<ObjectInfo>& files() const noexcept { return files_; }
  // What is read is compared with the digests that there are. Throws `conflict` if the file's size
  // has changed.
  [[nodiscard]] std::shared_ptr<ByteSource> open(const ObjectInfo& file) const;
  // The last bytes of a file as it is now. A save's id is among those of `.metadata`.
  [[nodiscard]] std::vector<std::byte> end_of(const ObjectInfo& file) const;
  [[nodiscard]] const std::string& name() const { return store_->name(); }

 private:
  std::shared_ptr<Store> plain_;
  std::shared_ptr<Store> store_;  // the same, guarded by the digests that are known
  std::shared_ptr<Store> inner_;  // the DCP part of olmo_torch_new; null: there is none
  std::vector<ObjectInfo> files_;
};

}  // namespace tessera
