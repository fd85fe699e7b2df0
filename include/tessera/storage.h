// Store: named objects in a flat or nested directory: on disk, in memory, in an object store.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/io.h"
#include "tessera/location.h"
#include "tessera/stores.h"

namespace [[gnu::visibility("default")]] tessera {

struct ObjectInfo {
  std::string name;          // relative to the store's root, '/' between parts
  std::uint64_t size = 0;    // bytes
  std::string version = {};  // ByteSource::version, where a listing tells it; else empty
  std::optional<std::chrono::system_clock::time_point> written = {};  // where a listing tells it
};

// A store of your own overrides what has no body here. Objects in memory take some thirty lines.
// Object names are relative, use '/', and never leave the root: every member refuses a name that is
// absolute or has a ".." part with `unsafe`. Several threads may call members at once.
class Store {
 public:
  virtual ~Store() = default;
  [[nodiscard]] virtual const std::string& name() const = 0;  // for errors: the directory or URL
  // The objects below `prefix`, by name; none if it is absent. What we may not read is passed over.
  [[nodiscard]] virtual std::vector<ObjectInfo> list(std::string_view prefix = {}) const = 0;
  // The objects, and the directories, directly in one; both sorted, on a disk also empty ones.
  [[nodiscard]] virtual std::vector<ObjectInfo> list_level(std::string_view prefix = {}) const;
  [[nodiscard]] virtual std::vector<std::string> list_directories(std::string_view in = {}) const;
  [[nodiscard]] virtual bool exists(std::string_view name) const;  // whether `open` would find it
  // Throws `not_found` if there is no such object, and `unsafe` for a link that leaves the root.
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open(std::string_view name) const = 0;
  // What a listing has told: that version, or `conflict` here or at a read. Saves asking again.
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open_listed(const ObjectInfo& object) const;
  // A new object, invisible until its commit. An existing one is `already_exists` with
  // IfExists::fail: here, or where to ask takes a request of its own before much is sent, and at
  // commit. `size_hint` (0: unknown) lets the store reserve room.
  [[nodiscard]] virtual std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                         std::uint64_t size_hint = 0) = 0;
  // A new version of an object, whose commit is `conflict` if it is not `expected` any more.
  [[nodiscard]] virtual std::unique_ptr<ByteSink> replace(std::string_view name,
                                                          std::string_view expected,
                                                          std::uint64_t size_hint = 0);
  // An object that several writers fill, visible at once: each opens it and commits bytes of its
  // own. A directory that appears whole. Both are `unsupported` in a store that has neither.
  [[nodiscard]] virtual std::unique_ptr<ByteSink> share(std::string_view name);
  [[nodiscard]] virtual std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                                    IfExists if_exists);
  [[nodiscard]] virtual bool has_directories() const { return false; }  // it has both
  virtual StoreCopied copy(const StoreCopy& what);  // by the store's own means, if it can
  virtual void remove(std::string_view name) = 0;   // no error if there is no such object
  [[nodiscard]] virtual bool is_read_only() const { return false; }  // each write is `unsupported`
  // The call tries by an object `probe` what a save asks for, where rights are granted one by one.
  // It throws what is refused, and `unsupported` if commits let rivals in, unless `is_only_writer`.
  virtual void require_writable(std::string_view probe, bool is_only_writer);
  virtual void remove_unfinished() {}  // of killed writers; only while nobody writes to the store
  virtual void sync() {}               // objects committed before it survive a crash after it
  // Uploads of `name` and below it that anybody began before then. None: a store without uploads.
  [[nodiscard]] virtual std::optional<std::vector<UnfinishedUpload>> uploads_begun_before(
      std::chrono::system_clock::time_point then, std::string_view name = {}) const;
  // Keeps others that ask out of a directory: they get `conflict`. Null: the store cannot.
  [[nodiscard]] virtual std::unique_ptr<StoreHold> hold(std::string_view directory = {});
  [[nodiscard]] virtual std::optional<std::uint64_t> free_bytes() const;  // none: unknown
  [[nodiscard]] virtual bool may_show_late() const { return true; }       // what others have made
};

// Objects in this process's memory: the reference implementation.
[[nodiscard]] std::shared_ptr<Store> memory_store(std::string name = "memory");
// A local directory. The first create makes it and its parents. A URL is `unsupported`.
[[nodiscard]] std::shared_ptr<Store> posix_store(const std::string& directory);
// The directory of a path or URL: file, s3, r2, weka, gs, hf, http(s); docs/guide/object-stores.md.
[[nodiscard]] std::shared_ptr<Store> open_store(const std::string& path_or_url);

// Writes a small object whole: create, write_at, commit.
void put(Store& store, std::string_view name, ByteView bytes, IfExists if_exists);

}  // namespace tessera
