// The objects of a store that somebody asks for by name. Only the directories that these names are
// in are looked into: whatever else lies in the store may be closed to us (`lost+found` at the root
// of a volume), and may be much.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

class NearObjects {
 public:
  using ByName = std::map<std::string, ObjectInfo, std::less<>>;

  // `store` outlives it. Its root is listed at once.
  explicit NearObjects(const Store& store) : store_(store) { look_into(""); }
  // `root`: what a listing of it has told already.
  NearObjects(const Store& store, const std::vector<ObjectInfo>& root) : store_(store), seen_{""} {
    for (const ObjectInfo& object : root) objects_.emplace(object.name, object);
  }

  // What was listed until now: at first what is at the root.
  [[nodiscard]] const ByName& listed() const { return objects_; }
  // Null: there is no such object. Throws what the listing of its directory throws.
  [[nodiscard]] const ObjectInfo* find(std::string_view name) {
    const std::size_t slash = name.rfind('/');
    if (slash != std::string_view::npos) look_into(name.substr(0, slash));
    const auto found = objects_.find(name);
    return found == objects_.end() ? nullptr : &found->second;
  }

 private:
  // A hostile file may name as many directories as it likes, and each is a request to a store: then
  // one listing of all is asked for.
  static constexpr std::size_t kMostDirectories = 64;

  void look_into(std::string_view directory) {
    if (seen_.size() > kMostDirectories || !seen_.emplace(directory).second) return;
    const bool all = seen_.size() > kMostDirectories;
    for (ObjectInfo& object : all ? store_.list() : store_.list_level(directory)) {
      std::string name = object.name;
      objects_.emplace(std::move(name), std::move(object));
    }
  }

  const Store& store_;
  std::set<std::string, std::less<>> seen_;
  ByName objects_;
};

}  // namespace tessera
