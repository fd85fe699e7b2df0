#include "checkpoint/run/copy_object.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/digest.h"
#include "base/stop.h"
#include "checkpoint/digests/guard.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kWindow = 8 << 20;  // bytes

// Gives all bytes to `take`, one window after another, and returns their digest.
std::uint64_t for_each_window(const ByteSource& source,
                              const std::function<void(std::uint64_t at, ByteView bytes)>& take) {
  RunningDigest digest;
  std::vector<std::byte> window(static_cast<std::size_t>(std::min(kWindow, source.size())));
  for (std::uint64_t at = 0; at < source.size(); at += window.size()) {
    const auto bytes = MutableByteView(window).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), source.size() - at)));
    source.read_at(at, bytes);
    digest.add(bytes);
    take(at, bytes);
  }
  return digest.value();
}

}  // namespace

WrittenObject write_copy(const ByteSource& source, Store& to, const std::string& name,
                         IfExists if_exists, Meter& meter) {
  require_going_on(meter.stop());
  WrittenObject written{name, to.create(name, if_exists, source.size()), source.size()};
  written.digest = for_each_window(source, [&](std::uint64_t at, ByteView bytes) {
    written.sink->write_at(at, bytes);
    meter.add(bytes.size());
  });
  return written;
}

bool has_copy(const Store& to, const std::string& name, const ByteSource& source,
              const std::optional<FileDigests>& digests, const Meter& meter) {
  if (!to.exists(name)) return false;
  std::shared_ptr<ByteSource> there = to.open(name);
  if (there->size() != source.size()) return false;
  const auto go_on = [&](std::uint64_t, ByteView) { require_going_on(meter.stop()); };
  if (!digests) return for_each_window(*there, go_on) == for_each_window(source, go_on);
  try {
    (void)for_each_window(*guarded_source(std::move(there), *digests), go_on);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::corrupt || error.code() == ErrorCode::incomplete) return false;
    throw;
  }
  return true;
}

void commit_copy(WrittenObject& written, Store& to, bool read_back) {
  written.sink->commit();
  const auto there = to.open(written.name);
  if (there->size() != written.size) {
    throw Error(ErrorCode::incomplete, "the target has " + std::to_string(there->size()) + " of " +
                                           std::to_string(written.size) + " bytes")
        .at_path(there->name());
  }
  if (!read_back) return;
  if (for_each_window(*there, [](std::uint64_t, ByteView) {}) != written.digest) {
    throw Error(ErrorCode::corrupt, "the target gives other bytes than were written")
        .at_path(there->name());
  }
}

}  // namespace tessera
