#include "base/freed_memory.h"

#include <atomic>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tessera {

#ifdef __GLIBC__
namespace {
constexpr std::uint64_t kKept = 16 << 20;
std::atomic<std::uint64_t> kept_bytes{0};
}  // namespace

void note_freed(std::uint64_t bytes) {
  if (kept_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes < kKept) return;
  kept_bytes.store(0, std::memory_order_relaxed);
  ::malloc_trim(0);
}
#else
void note_freed(std::uint64_t) {}
#endif

}  // namespace tessera
