// What stores can do beyond reading and writing, a cache on a disk of this machine, and libraries
// loaded ahead of time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/io.h"

namespace [[gnu::visibility("default")]] tessera {

// What not every store can do: directories that appear whole, holds, copies by a server, uploads
// that it knows of.

enum class IfExists { fail, replace };

// A directory that appears whole under its name, or not at all. Made by Store::new_directory.
// Without commit it goes, with all that is in it.
class NewDirectory {
 public:
  NewDirectory() = default;
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  virtual ~NewDirectory() = default;

  // What it is called in the store until its commit: "NAME-tmp-" and an attempt. Write here.
  [[nodiscard]] virtual const std::string& working() const = 0;
  // IsReplaced says whether an object of the directory that had the name before goes. `name` is
  // relative to that directory.
  using IsReplaced = std::function<bool(std::string_view name)>;
  // Gives it its name in one step, durably; its objects must be durable. What had the name before
  // stays whole until then. Afterwards those of its objects are there too that `is_replaced` says
  // no of and that the new directory has no own of that name for; the others are removed. Null: all
  // are removed. At most once.
  virtual void commit(const IsReplaced& is_replaced) = 0;
  void commit() { commit(IsReplaced()); }
};

// A directory that one writer has for itself. Made by Store::hold, and ends with the process that
// has it, however that ends. Nobody else holds the directory meanwhile; writers that do not ask are
// not kept out.
class StoreHold {
 public:
  StoreHold() = default;
  StoreHold(const StoreHold&) = delete;
  StoreHold& operator=(const StoreHold&) = delete;
  virtual ~StoreHold() = default;

  // Throws `conflict` if somebody has deleted the directory, whether or not it was made again.
  virtual void require_there() const = 0;
};

// A copy that a store makes by itself: no bytes pass through this process.
struct StoreCopy {
  // What open() of this store gave, or of one with the same server and credentials, also through a
  // cache (ByteSource::original). If its object is replaced before the end, the copy is `conflict`,
  // never a mixture.
  const ByteSource& from;
  std::string name;  // of the copy
  IfExists if_exists = IfExists::replace;
  // Hears of bytes that are copied. What it throws ends the copy.
  std::function<void(std::uint64_t bytes)> copied;
};

enum class StoreCopied : std::uint8_t {
  cannot,     // nothing was done: read and write the bytes instead
  done,       // the copy is visible, by one step
  was_there,  // the object is a copy already that the store made of this version of the source
};

// The parts of an object that is not complete. They cost money, and no listing shows them. One of
// which the server does not say when it began is never told.
struct UnfinishedUpload {
  std::string path;         // of the object, for errors: the store's name, '/' and the object's
  bool is_ours = false;     // it has the mark of this library, which comes with its first parts
  std::uint64_t bytes = 0;  // of the parts that are there
  std::chrono::system_clock::time_point last;  // its begin or its last part: what came later
  std::function<void()> abort;                 // no error if it has ended meanwhile
};

// Blocks of remote objects on a disk of this machine, for whoever reads checkpoints by their URLs.

struct LocalCache {
  // May hold other things: the cache has a directory of its own in it, tessera-blocks-UID, and
  // touches nothing else.
  std::string directory;
  // What it may grow to. Blocks that were not used for longest go first.
  std::uint64_t most_bytes = std::uint64_t{50} << 30U;
};

// From now on what this process reads of checkpoints at URLs is kept there, and read from there if
// the object still is the version that it was: of the same address, its query included, and with
// the same strong ETag. What has none is not kept. Each MiB has a digest, so damage is no more than
// a miss. Processes of one user may share a directory, and those of several users, each of whom has
// blocks of its own. A disk that is full or cannot be written is told once, and costs nothing else.
// Throws `unsafe` if what is at tessera-blocks-UID is not a directory of this user alone with the
// cache's marker, and `unsupported` if that is of another version. Without a value it ends. Not
// while another thread opens checkpoints.
void use_local_cache(std::optional<LocalCache> cache);

// What stores need of other libraries, loaded ahead of time.

// Loads the libraries that the store of a URL needs; else the first open_store() of one does, on
// whatever thread that is. They read the environment while they are loaded (library.h). Nothing
// for a path. Throws `unsupported` where a library is missing or too old.
void prepare_store(const std::string& path_or_url);

}  // namespace tessera
