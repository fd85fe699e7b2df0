#include "checkpoint/read/zstd_source.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

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
      : stream_(std::move(frames), cap) {
    keep_ends();
    size_ = stream_.position();
  }

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return stream_.frames().name(); }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (head_.give(offset, out) || tail_.give(offset, out)) return;
    const std::lock_guard lock(mutex_);
    stream_.go_to(offset);
    if (stream_.position() != offset || stream_.read(out) < out.size())
      throw Error(ErrorCode::incomplete, "zstd frames have changed").at_path(name());
  }

 private:
  // Frames of a stream do not say how long they are: one pass counts. Archives have what describes
  // them at their ends: these are kept, so that no further pass is needed for that.
  void keep_ends() {
    head_.bytes.resize(kKept);
    head_.bytes.resize(stream_.read(head_.bytes));
    if (head_.bytes.size() < kKept) return;
    std::vector<std::byte>& last = tail_.bytes;
    last.resize(2 * kKept);
    std::size_t have = 0;
    while (const std::size_t got = stream_.read(MutableByteView(last).subspan(have, kKept))) {
      have += got;
      if (have < last.size()) continue;
      std::memcpy(last.data(), last.data() + kKept, kKept);
      have = kKept;
    }
    last.resize(have);
    tail_.offset = stream_.position() - have;
  }

  std::uint64_t size_ = 0;  // of the content
  Kept head_, tail_;
  mutable std::mutex mutex_;
  mutable ZstdStream stream_;  // guarded by mutex_ once the constructor is done
};

}  // namespace

std::shared_ptr<const ByteSource> zstd_source(std::shared_ptr<const ByteSource> frames,
                                              std::uint64_t cap) {
  return std::make_shared<ZstdSource>(std::move(frames), cap);
}

}  // namespace tessera
