// Store: a flat or nested directory of named objects, on disk, in memory, later in an object store.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/io.h"

namespace tessera {

struct ObjectInfo {
  std::string name;        // relative to the store's root, '/' between parts
  std::uint64_t size = 0;  // bytes
};

enum class IfExists { fail, replace };

// A store of one's own overrides what has no body here: objects in memory need some thirty lines.
// Object names are relative, use '/', and never leave the root: a name that is absolute or has a
// ".." part is refused with `unsafe` by every member. Members may be called from several threads.
class Store {
 public:
  virtual ~Store() = default;
  // What the store is called in an Error: its directory or URL.
  [[nodiscard]] virtual const std::string& name() const = 0;
  // Every object below `prefix` (a directory name or empty), sorted by name; an absent directory is
  // empty.
  [[nodiscard]] virtual std::vector<ObjectInfo> list(std::string_view prefix = {}) const = 0;
  // Those directly in `prefix`, none of directories in it.
  [[nodiscard]] virtual std::vector<ObjectInfo> list_level(std::string_view prefix = {}) const;
  // Whether `open` finds it.
  [[nodiscard]] virtual bool exists(std::string_view name) const;
  // Throws `not_found` when there is no such object, `unsafe` for a link that leaves the root.
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open(std::string_view name) const = 0;
  // A new object, invisible until its commit. With IfExists::fail an object of that name is
  // `already_exists`, checked again at commit. `size_hint` (0: unknown) lets the store reserve
  // room.
  [[nodiscard]] virtual std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                         std::uint64_t size_hint = 0) = 0;
  // Absent is not an error.
  virtual void remove(std::string_view name) = 0;
  // Removes what writers that were killed left behind. Only while nobody writes to the store.
  virtual void remove_unfinished() {}
  // Makes the directory entries of all committed objects durable; objects committed before a sync
  // survive a crash after it. A no-op where the store is durable by itself.
  virtual void sync() {}
};

// Objects in this process's memory: the reference implementation.
[[nodiscard]] std::shared_ptr<Store> memory_store(std::string name = "memory");
// A local directory. It and its parents are made at the first create.
[[nodiscard]] std::shared_ptr<Store> posix_store(const std::string& directory);
// Where a checkpoint is or goes: a path, or a store, whose root or one object of which it is.
struct Location {
  template <std::convertible_to<std::string> Path>  // a literal, std::string, std::filesystem::path
  Location(const Path& at) : path(at) {}            // NOLINT(google-explicit-constructor)
  // An empty `in_store` is the store's root, as for a checkpoint that is a directory.
  template <std::derived_from<Store> AnyStore>
  Location(std::shared_ptr<AnyStore> of, std::string in_store = {})  // NOLINT
      : store(std::move(of)), name(std::move(in_store)) {}

  std::string path;              // empty: `store` counts
  std::shared_ptr<Store> store;  // null: `path` counts
  std::string name;              // of an object in `store`
};
// What to call it in an Error.
[[nodiscard]] std::string to_string(const Location& where);

// Writes a small object whole: create, write_at, commit.
void put(Store& store, std::string_view name, ByteView bytes, IfExists if_exists);

}  // namespace tessera
