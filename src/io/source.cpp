#include "io/source.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "base/numbers.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {
namespace {

class BorrowedSource final : public ByteSource {
 public:
  BorrowedSource(ByteView bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  ByteView bytes_;
  std::string name_;
};

class SliceSource final : public ByteSource {
 public:
  SliceSource(std::shared_ptr<const ByteSource> source, std::uint64_t offset, std::uint64_t size)
      : source_(std::move(source)), offset_(offset), size_(size) {}
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size(), offset_);
    source_->read_at(offset_ + offset, out);
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    std::vector<ReadRange> moved(ranges.begin(), ranges.end());
    for (ReadRange& range : moved) {
      require_range(*this, range.offset, range.out.size(), offset_);
      range.offset += offset_;
    }
    source_->read_ranges(moved);
  }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return source_->request_cost(); }
  [[nodiscard]] bool checked() const override { return source_->checked(); }
  [[nodiscard]] std::shared_ptr<std::byte[]> map() const override {
    auto whole = source_->map();
    return whole ? std::shared_ptr<std::byte[]>(whole, whole.get() + offset_) : nullptr;
  }
  [[nodiscard]] SourcePart part() const { return {*source_, offset_}; }

 private:
  std::shared_ptr<const ByteSource> source_;
  std::uint64_t offset_;  // of our first byte in source_
  std::uint64_t size_;
};

}  // namespace

SourcePart part_of(const ByteSource& source) {
  const auto* slice = dynamic_cast<const SliceSource*>(&source);
  return slice != nullptr ? slice->part() : SourcePart{source};
}

std::shared_ptr<ByteSource> slice_source(std::shared_ptr<const ByteSource> source,
                                         std::uint64_t offset, std::uint64_t size) {
  require_range(*source, offset, size);
  return std::make_shared<SliceSource>(std::move(source), offset, size);
}

std::shared_ptr<ByteSource> memory_source(std::vector<std::byte> bytes, std::string name) {
  struct Owned {
    std::vector<std::byte> bytes;
    BorrowedSource source;
  };
  const ByteView view(bytes);  // moving a vector leaves its elements where they are
  auto owned =
      std::make_shared<Owned>(Owned{std::move(bytes), BorrowedSource(view, std::move(name))});
  auto* source = &owned->source;
  return {std::move(owned), source};
}

std::shared_ptr<ByteSource> borrowed_source(ByteView bytes, std::string name) {
  return std::make_shared<BorrowedSource>(bytes, std::move(name));
}

std::vector<std::byte> read_all(const ByteSource& source, std::uint64_t cap) {
  const std::uint64_t size = source.size();
  if (size > cap) {
    throw Error(ErrorCode::limit, "the object has " + std::to_string(size) + " bytes, the cap is " +
                                      std::to_string(cap))
        .at_path(source.name());
  }
  std::vector<std::byte> bytes(narrow<std::size_t>(size));
  source.read_at(0, bytes);
  return bytes;
}

namespace {

class MemorySink final : public ByteSink {
 public:
  MemorySink(std::string name, std::function<void(std::vector<std::byte>)> commit)
      : name_(std::move(name)), commit_(std::move(commit)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override {
    const std::lock_guard lock(mutex_);
    require_open();
    if (bytes.empty()) return;
    const auto end = narrow<std::size_t>(checked_add<std::uint64_t>(offset, bytes.size()));
    if (end > bytes_.size()) bytes_.resize(end);
    std::memcpy(bytes_.data() + offset, bytes.data(), bytes.size());
  }

  void commit() override {
    const std::lock_guard lock(mutex_);
    require_open();
    open_ = false;
    commit_(std::move(bytes_));
  }

  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  void require_open() const {
    if (!open_) throw Error(ErrorCode::invalid_argument, "already committed").at_path(name_);
  }

  const std::string name_;
  const std::function<void(std::vector<std::byte>)> commit_;
  std::mutex mutex_;              // guards everything below
  std::vector<std::byte> bytes_;  // what was written so far; gaps are zero
  bool open_ = true;              // until commit
};

}  // namespace

std::unique_ptr<ByteSink> memory_sink(std::string name,
                                      std::function<void(std::vector<std::byte> bytes)> commit) {
  return std::make_unique<MemorySink>(std::move(name), std::move(commit));
}

}  // namespace tessera
