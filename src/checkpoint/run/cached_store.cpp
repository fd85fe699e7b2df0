#include "tessera/copy.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/located.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/side_file.h"
#include "io/source.h"
#include "storage/forwarding_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::shared_ptr<Store> store_of_directory(const std::shared_ptr<Store>& store,
                                          const std::string& path) {
  return path.empty() ? store : std::make_shared<SubStore>(store, path);
}

bool has_same_metadata(const Store& store, const Store& cache) {
  if (!cache.exists(kDcpMetadata)) return false;
  const auto there = store.open(kDcpMetadata);
  const auto here = cache.open(kDcpMetadata);
  return there->size() == here->size() &&
         read_all(*there, kMetadataLimit) == read_all(*here, kMetadataLimit);
}

// What a store says of its files that a copy elsewhere can be compared with.

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

  // The rule for a file that both have. A directory that cannot be read is no failure: its copies
  // are not taken.
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

// The nearest directory that has digests of the file counts.
CopyRule KnownDigests::rule_of(const std::string& name) {
  const std::lock_guard lock(mutex_);
  CopyRule rule;
  for (std::size_t slash = name.rfind('/');; slash = name.rfind('/', slash - 1)) {
    const bool is_root = slash == std::string::npos || slash == 0;
    const Directory& above = directory(is_root ? "" : name.substr(0, slash));
    if (!above.is_readable) return {.may_be_taken = false};
    const auto found = above.digests->find(is_root ? name : name.substr(slash + 1));
    if (found != above.digests->end()) return {true, found->second};
    if (above.has_other_metadata) rule.may_be_taken = false;
    if (is_root) return rule;
  }
}

const KnownDigests::Directory& KnownDigests::directory(const std::string& path) {
  const auto known = directories_.find(path);
  if (known != directories_.end()) return known->second;
  return directories_.emplace(path, look_into(path)).first->second;
}

KnownDigests::Directory KnownDigests::look_into(const std::string& path) const {
  Directory found{.digests = std::make_shared<DigestsByName>()};
  const auto store = store_of_directory(store_, path);
  try {
    if (store->exists(kDcpMetadata)) {
      std::vector<std::string> warnings;  // who opens the checkpoint hears of them
      found.digests = guard_dcp(store, read_dcp_metadata(*store), warnings).digests;
      found.has_other_metadata = !has_same_metadata(*store, *store_of_directory(cache_, path));
    } else if (path.empty() && store->exists(kDirectorySideFile)) {
      found.digests =
          std::make_shared<DigestsByName>(read_side_file(*store, kDirectorySideFile).files);
    }
  } catch (const Error&) {
    found.is_readable = false;
  }
  return found;
}

constexpr std::uint64_t kCompared = 1 << 20;  // bytes at the end of a file without digests

std::shared_ptr<ByteSource> checked(std::shared_ptr<ByteSource> source,
                                    const std::optional<FileDigests>& digests) {
  return digests ? guarded_source(std::move(source), *digests) : source;
}

bool has_same_end(const ByteSource& a, const ByteSource& b) {
  const std::uint64_t size = std::min(kCompared, a.size());
  std::vector<std::byte> end_of_a(static_cast<std::size_t>(size));
  std::vector<std::byte> end_of_b(end_of_a.size());
  a.read_at(a.size() - size, end_of_a);
  b.read_at(b.size() - size, end_of_b);
  return end_of_a == end_of_b;
}

// Reads the copy until that fails, and the file from then on.
class NearCopySource final : public ForwardingSource {
 public:
  NearCopySource(std::shared_ptr<ByteSource> file, std::shared_ptr<ByteSource> copy)
      : ForwardingSource(std::move(file)), copy_(std::move(copy)) {}

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    if (!from_copy([&] { copy_->read_at(offset, out); })) inner().read_at(offset, out);
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    if (!from_copy([&] { copy_->read_ranges(ranges); })) inner().read_ranges(ranges);
  }
  [[nodiscard]] std::uint64_t request_cost() const override {
    return failed_ ? inner().request_cost() : copy_->request_cost();
  }
  // Pages of the copy could not give way to the file.
  [[nodiscard]] std::shared_ptr<std::byte[]> map() const override { return nullptr; }

 private:
  template <typename Read>
  bool from_copy(const Read& read) const {
    if (failed_) return false;
    try {
      read();
      return true;
    } catch (const Error&) {
      failed_ = true;
      return false;
    }
  }

  std::shared_ptr<ByteSource> copy_;
  mutable std::atomic<bool> failed_{false};
};

// What is written to it is the store's alone: from then on nothing is read from the cache.
class NearCopiesStore final : public ForwardingStore {
 public:
  NearCopiesStore(const std::shared_ptr<Store>& store, std::shared_ptr<Store> cache)
      : ForwardingStore(store), cache_(std::move(cache)), known_(store, cache_) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto file = ForwardingStore::open(name);
    if (written_) return file;
    auto copy = copy_of(std::string(name), *file);
    if (!copy) return file;
    const CopyRule rule = known_.rule_of(std::string(name));
    if (!is_good(rule, *file, *copy)) return file;
    return std::make_shared<NearCopySource>(checked(std::move(file), rule.digests),
                                            checked(std::move(copy), rule.digests));
  }

 private:
  void before_change() override { written_ = true; }

  // Null: there is none of that size. A cache that fails has none.
  std::shared_ptr<ByteSource> copy_of(const std::string& name, const ByteSource& file) const {
    if (is_side_file_name(name) || name == kDirectorySideFile) return nullptr;
    try {
      if (!cache_->exists(name)) return nullptr;
      auto copy = cache_->open(name);
      return copy->size() == file.size() ? copy : nullptr;
    } catch (const Error&) {
      return nullptr;
    }
  }

  static bool is_good(const CopyRule& rule, const ByteSource& file, const ByteSource& copy) {
    if (!rule.may_be_taken || (rule.digests && rule.digests->size != file.size())) return false;
    try {
      return rule.digests || has_same_end(file, copy);
    } catch (const Error&) {
      return false;
    }
  }

  std::shared_ptr<Store> cache_;
  mutable KnownDigests known_;
  std::atomic<bool> written_{false};
};

}  // namespace

std::shared_ptr<Store> cached_store(const Location& of, const Location& cache) {
  return std::make_shared<NearCopiesStore>(directory_store(of), directory_store(cache));
}

}  // namespace tessera
