#include <cstring>
#include <mutex>
#include <utility>

#include "base/checked.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {
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
