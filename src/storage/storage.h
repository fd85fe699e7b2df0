// What every store shares: the rules of names, which store a path or a URL means, objects that
// somebody asks for by name.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
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

// "tessera-ATTEMPT.probe", a small object by which writers see who else looks at their place.
[[nodiscard]] std::string probe_name(const std::string& attempt);
[[nodiscard]] bool is_probe_name(std::string_view name);  // of any attempt

[[nodiscard]] inline bool has_object(const std::vector<ObjectInfo>& objects,
                                     std::string_view name) {
  return std::ranges::find(objects, name, &ObjectInfo::name) != objects.end();
}

// The object; null: there is none.
[[nodiscard]] std::shared_ptr<ByteSource> open_if_there(const Store& store, std::string_view name);

// Which store a path or a URL means.

inline constexpr std::string_view kFileScheme = "file";  // of paths as URLs
// Whether open_store() gives something else for it than a directory of this machine. "./s3://b" is
// a path, and file:///b is none that is remote.
[[nodiscard]] bool is_remote(const std::string& path);
// Whether it is a URL of a store in which nobody writes: a web server's, or the Hugging Face Hub's.
[[nodiscard]] bool is_read_only(std::string_view path);
// What the last part of a URL names in the directory above: of a bucket as it is, of a web address
// decoded, without the query. Empty where the URL ends with a slash, or names a whole bucket or
// repository.
[[nodiscard]] std::string last_name(const std::string& url);
// The store of the directory above, in which last_name() is what `url` names: a web server is asked
// for that as it was written. The query of a web address belongs to all names of the store.
[[nodiscard]] std::shared_ptr<Store> open_above(const std::string& url);
// The path of a file:// URL; anything else as it is. Throws `invalid_argument` for file://HOST/.
[[nodiscard]] std::string without_file_scheme(const std::string& path);

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

}  // namespace tessera
