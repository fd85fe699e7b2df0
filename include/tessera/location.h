// The place where a checkpoint is or goes, as functions take it.
#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <utility>

namespace [[gnu::visibility("default")]] tessera {

class Store;  // storage.h

// The place where a checkpoint is or goes: a path, a URL, or a store, of which it is the root or an
// object.
struct Location {
  template <std::convertible_to<std::string> Path>  // a literal, std::string, std::filesystem::path
  Location(const Path& at) : path(at) {}            // NOLINT(google-explicit-constructor)
  // An empty `in_store` is the store's root, for a checkpoint that is a directory.
  template <std::derived_from<Store> AnyStore>
  Location(std::shared_ptr<AnyStore> of, std::string in_store = {})  // NOLINT
      : store(std::move(of)), name(std::move(in_store)) {}
  std::string path;              // empty: `store` is used
  std::shared_ptr<Store> store;  // null: `path` is used
  std::string name;              // of an object in `store`
};
[[nodiscard]] std::string to_string(const Location& where);  // for errors

}  // namespace tessera
