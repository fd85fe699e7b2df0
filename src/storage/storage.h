// What every store shares: the rules of names, objects that somebody asks for by name, what a
// server knows beside them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// Rules that the names of objects obey in every store.

// Throws `unsafe` for a name that is empty, absolute, has an empty, "." or ".." part, or a NUL
// byte.
void require_safe_name(std::string_view name, const std::string& store);

// "s3" of s3://...; empty: a path. "./s3://b" is one.
[[nodiscard]] std::string_view scheme_of(std::string_view path);
// An address of http or https, which may have a query with a signature in it.
[[nodiscard]] bool is_web(std::string_view path);

// What is put behind a directory's name, with an attempt (base/process.h) after it, for what
// takes its place and for what had it.
inline constexpr std::string_view kWorkMark = "-tmp-", kOldMark = ".old-";

// The objects of a store that somebody asks for by name. Only the directories that these names are
// in are looked into: whatever else lies in the store may be closed to us (`lost+found` at the root
// of a volume), and may be much.

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

// What a store of a server knows of work that nobody finished, beside what every Store says.

using Time = std::chrono::system_clock::time_point;

// The parts of an object that is not complete. They cost money, and no listing shows them.
struct UnfinishedUpload {
  std::string path;         // of the object, for errors
  std::string key, id;      // how the server knows it
  bool is_ours = false;     // it was begun by this library, which marks its uploads
  std::uint64_t bytes = 0;  // of the parts that are there
  Time last;                // its begin or its last part: what came later
};

// Stores that have uploads are this, too.
class Housekeeping {
 public:
  Housekeeping() = default;
  Housekeeping(const Housekeeping&) = delete;
  Housekeeping& operator=(const Housekeeping&) = delete;
  virtual ~Housekeeping() = default;

  // Of the object that has the store's own name, and of those below, whoever began them, if they
  // were begun before that time. An upload of which the server does not say when it began is never
  // among them. One that was killed before its mark arrived has none.
  [[nodiscard]] virtual std::vector<UnfinishedUpload> uploads_begun_before(Time before) = 0;
  virtual void abort(const UnfinishedUpload& upload) = 0;  // no error if there is none
  // When each object was written, by the server's clock; those of which it does not say are absent.
  [[nodiscard]] virtual std::map<std::string, Time> times_of_objects() = 0;
};

}  // namespace tessera
