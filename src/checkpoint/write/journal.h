// What tells whether unfinished work, or a finished target, is that of one conversion.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/read/storage_checks.h"
#include "storage/posix/atomic_file.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/storage.h"

namespace tessera {

// Of everything that decides about the target's bytes: the files of `source` with their sizes and
// times, where each of `leaves` lies in them, the target's name, the options, our version.
[[nodiscard]] std::uint64_t fingerprint_of(const Checkpoint& source,
                                           const std::vector<Leaf>& leaves,
                                           const std::string& target,
                                           const ConvertOptions& options);

// Of the sizes and times of the files `names` in `directory`, which moving them does not change.
// None: one of them is not there.
[[nodiscard]] std::optional<std::uint64_t> identity_of(const std::string& directory,
                                                       const std::vector<std::string>& names);

// What an interruptible conversion has done, in a file that says nothing false after any kill.

// Parts of a source's storage that were read for a unit while the storage's checksum could not be
// compared yet. `storage` is its number among the source's.
struct OpenCheck {
  std::uint64_t storage = 0;
  std::vector<ReadRun> runs;
};

// Bytes of the target that one thread makes in one go: a tensor's elements, mostly.
struct JournalUnit {
  std::string file;        // of the work directory
  std::uint64_t what = 0;  // digest of what the bytes are
  std::uint64_t at = 0;    // of the file
  std::uint64_t size = 0;  // bytes
  std::uint64_t digest = 0;
  std::uint32_t crc = 0;
  std::vector<OpenCheck> open;
};

// A text of lines, each behind a digest of it and of the conversion's fingerprint: a line that is
// torn, damaged or of another conversion does not count. Lines are appended when the bytes they
// speak of were written; whether those are still there is for the reader to find out.
class Journal {
 public:
  // Reads what is in the file `fd`, which stays the caller's and is this process's alone. A journal
  // that does not begin as this conversion's is emptied, and gets `attempt`. `path` is for errors.
  Journal(int fd, std::string path, std::uint64_t fingerprint, const std::string& attempt);

  // Whether the file held a journal of this conversion; of another one, or something else.
  [[nodiscard]] bool goes_on() const noexcept { return goes_on_; }
  [[nodiscard]] bool was_foreign() const noexcept { return was_foreign_; }
  // The random part of data files' names, drawn when the conversion first began.
  [[nodiscard]] const std::string& attempt() const noexcept { return attempt_; }
  // What earlier runs say of the unit that begins here; null: nothing.
  [[nodiscard]] const JournalUnit* find(const std::string& file, std::uint64_t at) const;
  [[nodiscard]] bool has_units() const noexcept { return !units_.empty(); }
  // The identity that an earlier run gave to a finished target before it published it.
  [[nodiscard]] const std::optional<std::uint64_t>& published() const noexcept {
    return published_;
  }

  // From any thread.
  void append(const JournalUnit& unit);
  // Durable when it returns.
  void append_published(std::uint64_t identity);

 private:
  void read(const std::string& text);
  // What the line says; nothing when it does not count.
  [[nodiscard]] std::string payload_of(const std::string& line) const;
  void read_row(const std::string& payload);
  void begin(const std::string& attempt);
  void append_line(const std::string& payload);
  [[nodiscard]] std::string stamp(const std::string& payload) const;

  int fd_;
  std::string path_;
  std::uint64_t fingerprint_;
  bool goes_on_ = false;
  bool was_foreign_ = false;
  std::string attempt_;
  std::map<std::pair<std::string, std::uint64_t>, JournalUnit> units_;  // by file and place
  std::optional<std::uint64_t> published_;
  std::mutex mutex_;  // one line at a time
};

// The files of an interruptible conversion, in its work directory.

// Shows what was created in this run, as if it had begun with nothing; what is created anew has
// what an earlier run left in it.
class KeptStore final : public Store {
 public:
  explicit KeptStore(const std::string& directory) : files_(posix_store(directory)) {}

  [[nodiscard]] const std::string& name() const override { return files_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return created_now(files_->list(prefix));
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return created_now(files_->list_level(prefix));
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    const std::lock_guard lock(mutex_);
    return created_.contains(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return files_->open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists,
                                                 std::uint64_t size_hint) override {
    auto file = std::make_unique<KeptFile>(files_->name() + "/" + std::string(name), size_hint);
    const std::lock_guard lock(mutex_);
    created_.emplace(name);
    return file;
  }
  void remove(std::string_view name) override {
    files_->remove(name);
    const std::lock_guard lock(mutex_);
    created_.erase(std::string(name));
  }
  void remove_unfinished() override {}
  void sync() override {}

  // Removes what earlier runs left and this one did not create.
  void remove_strays() {
    for (const ObjectInfo& object : files_->list()) {
      if (!exists(object.name)) files_->remove(object.name);
    }
  }

 private:
  [[nodiscard]] std::vector<ObjectInfo> created_now(std::vector<ObjectInfo> objects) const {
    std::erase_if(objects, [this](const ObjectInfo& object) { return !exists(object.name); });
    return objects;
  }

  std::shared_ptr<Store> files_;
  mutable std::mutex mutex_;
  std::set<std::string, std::less<>> created_;  // guarded by mutex_
};

}  // namespace tessera
