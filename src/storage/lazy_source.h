// An object of a store that is opened when it is first read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/process.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {

class LazySource;

// Keeps at most `capacity` of its sources open: checkpoints have more files than a process may
// have descriptors. The one that was opened first is closed, and opened again at its next read.
class OpenFiles {
 public:
  static constexpr std::size_t kCapacity = 256;
  explicit OpenFiles(std::size_t capacity = kCapacity) : capacity_(capacity) {}

 private:
  friend class LazySource;
  void opened(const LazySource& source);
  void gone(const LazySource& source);

  const std::size_t capacity_;
  ShortMutex mutex_;                    // taken before a source's
  std::list<const LazySource*> order_;  // guarded by mutex_
};

// Whenever it is opened it is what the listing told, or `conflict`: another file may have its name
// by then.
class LazySource final : public ByteSource {
 public:
  // Without `files` it stays open once it is.
  LazySource(std::shared_ptr<const Store> store, ObjectInfo object,
             std::shared_ptr<OpenFiles> files = nullptr)
      : LazySource(std::move(store), std::move(object), false, std::move(files)) {}
  // `is_missing`: there is no such object, and whoever reads is told so; `object` has the bytes
  // that it would need to have.
  LazySource(std::shared_ptr<const Store> store, ObjectInfo object, bool is_missing,
             std::shared_ptr<OpenFiles> files)
      : store_(std::move(store)),
        object_(std::move(object)),
        name_(store_->name() + "/" + object_.name),
        is_missing_(is_missing),
        files_(std::move(files)) {}
  ~LazySource() override {
    if (files_) files_->gone(*this);
  }
  LazySource(const LazySource&) = delete;
  LazySource& operator=(const LazySource&) = delete;

  [[nodiscard]] const Store& store() const noexcept { return *store_; }
  [[nodiscard]] const ObjectInfo& object() const noexcept { return object_; }
  [[nodiscard]] bool is_missing() const noexcept { return is_missing_; }
  // `incomplete`: what reading one throws that is missing.
  [[nodiscard]] Error missing() const {
    return Error(ErrorCode::incomplete,
                 "the file is missing that this lies in; --partial leaves out what is missing")
        .at_path(name_);
  }
  [[nodiscard]] std::uint64_t size() const override { return object_.size; }
  // Throws what the first read would, if it is not open yet.
  void open() const { (void)current(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    current()->read_at(offset, out);
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    current()->read_ranges(ranges);
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::string version() const override { return current()->version(); }
  [[nodiscard]] std::uint64_t request_cost() const override {
    return is_missing_ ? kNearRequest : current()->request_cost();
  }
  [[nodiscard]] bool checked() const override { return !is_missing_ && current()->checked(); }
  [[nodiscard]] std::shared_ptr<std::byte[]> map() const override { return current()->map(); }

 private:
  friend class OpenFiles;
  using Source = std::shared_ptr<ByteSource>;

  Source current() const {
    if (Source source = known()) return source;
    Source source;
    {
      const std::lock_guard lock(opening_);  // one asks for it, the others wait
      if ((source = known())) return source;
      source = opened();
      const std::lock_guard moment(mutex_);
      source_ = source;
    }
    if (files_) files_->opened(*this);
    return source;
  }
  [[nodiscard]] Source known() const {
    const std::lock_guard lock(mutex_);
    return source_;
  }
  [[nodiscard]] Source opened() const {
    if (is_missing_) throw missing();
    Source source = store_->open_listed(object_);
    if (source->size() == object_.size) return source;
    throw Error(ErrorCode::conflict, "the file has " + std::to_string(source->size()) +
                                         " bytes, it had " + std::to_string(object_.size) +
                                         " when the checkpoint was opened")
        .at_path(name_);
  }
  // What was open; reads under way keep it open until they are done.
  [[nodiscard]] Source close() const {
    const std::lock_guard lock(mutex_);
    return std::move(source_);
  }

  std::shared_ptr<const Store> store_;
  ObjectInfo object_;
  std::string name_;
  bool is_missing_;
  std::shared_ptr<OpenFiles> files_;  // null: no bound
  mutable SlowMutex opening_;
  mutable ShortMutex mutex_;
  mutable Source source_;  // guarded by mutex_; null: closed
};

inline void OpenFiles::opened(const LazySource& source) {
  std::vector<LazySource::Source> closed;  // they end behind the lock
  const std::lock_guard lock(mutex_);
  order_.push_back(&source);
  while (order_.size() > capacity_) {
    closed.push_back(order_.front()->close());
    order_.pop_front();
  }
}

inline void OpenFiles::gone(const LazySource& source) {
  const std::lock_guard lock(mutex_);
  order_.remove(&source);
}

}  // namespace tessera
