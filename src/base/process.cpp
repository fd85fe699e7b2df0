#include "base/process.h"

#include <pthread.h>
#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "tessera/error.h"
#include "tessera/library.h"

namespace tessera {
namespace {

// Threads are counted while they are where nobody may fork, and kept from coming in by one that is
// about to.
struct Gate {
  std::atomic<std::uint64_t> number{1};
  std::atomic<int> inside{0};  // threads
  std::atomic<bool> is_shut{false};
};

Gate& gate() noexcept {
  static constinit Gate gate;
  return gate;
}

thread_local int depth = 0;  // of this thread's NoFork

// This thread, if a hook or a signal handler forks where it may not: waiting for itself would not
// end.
int counted_of_this_thread() noexcept {
  return depth > 0 ? 1 : 0;
}

void before_fork() noexcept {
  while (gate().is_shut.exchange(true)) ::sched_yield();  // another thread forks
  while (gate().inside.load() > counted_of_this_thread()) ::sched_yield();
}

void in_parent() noexcept {
  gate().is_shut = false;
}

void in_child() noexcept {
  ++gate().number;
  gate().inside = counted_of_this_thread();
  gate().is_shut = false;
}

[[maybe_unused]] const int kRegistered = ::pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

std::uint64_t process_number() noexcept {
  return gate().number.load(std::memory_order_relaxed);
}

void require_own_connections(const MadeHere& made) {
  if (made) return;
  throw Error(ErrorCode::invalid_argument,
              "this process was forked after its mesh was made, and the mesh is its parent's: make "
              "a mesh in the child");
}

void NoFork::enter() noexcept {
  if (depth++ > 0) return;
  while (true) {
    ++gate().inside;
    if (!gate().is_shut) return;
    --gate().inside;
    while (gate().is_shut) ::sched_yield();
  }
}

void NoFork::leave() noexcept {
  if (--depth == 0) --gate().inside;
}

namespace {

// Is there until the process ends, and after the destructors of static objects: threads may work
// on.
struct Latest {
  ShortMutex mutex;
  std::shared_ptr<const Variables> copy;  // null: none was made; guarded by mutex
};

Latest& latest = *new Latest;

std::shared_ptr<const Variables> copied() {
  auto copy = std::make_shared<Variables>();
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable)
    copy->emplace_back(*variable);
  return copy;
}

}  // namespace

void copy_environment() {
  std::shared_ptr<const Variables> copy = copied();
  const std::lock_guard lock(latest.mutex);
  latest.copy.swap(copy);
}

std::shared_ptr<const Variables> variables() {
  {
    const std::lock_guard lock(latest.mutex);
    if (latest.copy) return latest.copy;
  }
  return copied();
}

std::optional<std::string> variable_of(const Variables& all, std::string_view name) {
  for (const std::string& variable : all) {
    if (variable.size() > name.size() && variable[name.size()] == '=' && variable.starts_with(name))
      return variable.substr(name.size() + 1);
  }
  return std::nullopt;
}

std::optional<std::string> environment_variable(std::string_view name) {
  return variable_of(*variables(), name);
}

namespace {

std::array<std::uint64_t, 2> random_words() {
  std::array<std::uint64_t, 2> words{};
  std::size_t filled = 0;
  while (filled < sizeof words) {
    const ssize_t got =
        getrandom(reinterpret_cast<char*>(words.data()) + filled, sizeof words - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(ErrorCode::io, std::string("getrandom: ") + std::strerror(errno));
    filled += static_cast<std::size_t>(got);
  }
  return words;
}

}  // namespace

std::string random_attempt() {
  return fmt::format("{:016x}", random_words()[0]).substr(0, kAttemptDigits);
}

bool is_attempt(std::string_view text) {
  return text.size() == kAttemptDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string random_uuid() {
  auto [high, low] = random_words();
  high = (high & ~0xF000ULL) | 0x4000ULL;      // version 4
  low = (low & ~(3ULL << 62)) | (2ULL << 62);  // RFC 4122 variant
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xFFFF,
                     high & 0xFFFF, low >> 48, low & 0xFFFFFFFFFFFFULL);
}

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

namespace {

constexpr int version_number(std::string_view text) {
  int parts[3] = {};
  int at = 0;
  for (const char c : text) {
    if (c == '.') {
      ++at;
    } else {
      parts[at] = 10 * parts[at] + (c - '0');
    }
  }
  return 10000 * parts[0] + 100 * parts[1] + parts[2];
}

// The build says it once, in CMakeLists.txt, and the header has to agree.
static_assert(std::string_view(TESSERA_VERSION) == TESSERA_VERSION_STRING);
static_assert(version_number(TESSERA_VERSION_STRING) == TESSERA_VERSION_NUMBER);

}  // namespace

std::string_view version() noexcept {
  return TESSERA_VERSION_STRING;
}

}  // namespace tessera
