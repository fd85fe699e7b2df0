// What a store says of its files that a copy elsewhere can be compared with.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "checkpoint/read/side_file.h"
#include "tessera/storage.h"

namespace tessera {

// Whether a copy of a file may be read.
struct CopyRule {
  bool may_be_taken = true;
  std::optional<FileDigests> digests = {};  // none: nobody has recorded them
};

// Looks each directory up once. Used by several threads.
class KnownDigests {
 public:
  KnownDigests(std::shared_ptr<Store> store, std::shared_ptr<Store> cache)
      : store_(std::move(store)), cache_(std::move(cache)) {}

  // Of a file that both have. A directory that cannot be read is no failure: its copies are not
  // taken.
  [[nodiscard]] CopyRule rule_of(const std::string& name);

 private:
  struct Directory {
    bool is_readable = true;
    bool has_other_metadata = false;  // the cache's `.metadata` is not the store's
    std::shared_ptr<const DigestsByName> digests;
  };
  const Directory& directory(const std::string& path);
  [[nodiscard]] Directory look_into(const std::string& path) const;

  std::shared_ptr<Store> store_;
  std::shared_ptr<Store> cache_;
  std::mutex mutex_;
  std::map<std::string, Directory> directories_;  // by path; guarded by mutex_
};

}  // namespace tessera
