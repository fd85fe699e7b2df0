#include "checkpoint/read/zstd_source.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.h"
#include "checkpoint/read/zstd_stream.h"
#include "io/range.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kKept = 64 << 10;

// Bytes of the content that stay in memory.
struct Kept {
  std::uint64_t offset = 0;
  std::vector<std::byte> bytes;

  bool give(std::uint64_t at, MutableByteView out) const {
    if (at < offset || at - offset > bytes.size() || out.size() > bytes.size() - (at - offset))
      return false;
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at - offset), out.size(), out.begin());
    return true;
  }
};

class ZstdSource final : public ByteSource {
 public:
  ZstdSource(std::shared_ptr<const ByteSource> frames, std::uint64_t cap)
      : frames_(std::move(frames)), cap_(cap) {
    ZstdStream& stream = current().stream;
    keep_ends(stream);
    size_ = stream.position();
  }

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return frames_->name(); }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (head_.give(offset, out) || tail_.give(offset, out)) return;
    Current& now = current();
    const std::lock_guard lock(now.mutex);
    now.stream.go_to(offset);
    if (now.stream.position() != offset || now.stream.read(out) < out.size())
      throw Error(ErrorCode::incomplete, "zstd frames have changed").at_path(name());
  }

 private:
  struct Current {
    Current(std::shared_ptr<const ByteSource> frames, std::uint64_t cap)
        : stream(std::move(frames), cap) {}
    std::mutex mutex;
    ZstdStream stream;  // guarded by mutex once the source is made
  };
  // In a child from the first byte on: its parent's may have been in the middle of a frame.
  [[nodiscard]] Current& current() const {
    return current_.get([this] { return std::make_unique<Current>(frames_, cap_); });
  }

  // Frames of a stream do not say how long they are: one pass counts. Archives have what describes
  // them at their ends: these are kept, so that no further pass is needed for that.
  void keep_ends(ZstdStream& stream) {
    head_.bytes.resize(kKept);
    head_.bytes.resize(stream.read(head_.bytes));
    if (head_.bytes.size() < kKept) return;
    std::vector<std::byte>& last = tail_.bytes;
    last.resize(2 * kKept);
    std::size_t have = 0;
    while (const std::size_t got = stream.read(MutableByteView(last).subspan(have, kKept))) {
      have += got;
      if (have < last.size()) continue;
      std::memcpy(last.data(), last.data() + kKept, kKept);
      have = kKept;
    }
    last.resize(have);
    tail_.offset = stream.position() - have;
  }

  std::uint64_t size_ = 0;  // of the content
  Kept head_, tail_;
  std::shared_ptr<const ByteSource> frames_;
  std::uint64_t cap_;
  PerProcess<Current> current_;
};

}  // namespace

std::shared_ptr<const ByteSource> zstd_source(std::shared_ptr<const ByteSource> frames,
                                              std::uint64_t cap) {
  return std::make_shared<ZstdSource>(std::move(frames), cap);
}

}  // namespace tessera
