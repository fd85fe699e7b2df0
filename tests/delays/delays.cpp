// A library to preload (LD_PRELOAD): threads wait at random at locks and at calls on files and
// sockets, so that a few runs see orders of events that thousands would not.
//   TESSERA_DELAYS=N,US,SEED   before and after a call, once in N (locks: 10 N), up to US
//                              microseconds
// At its end the process says how often it waited.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>

namespace {

struct Settings {
  unsigned one_in = 0;  // 0: never
  long microseconds = 0;
  unsigned seed = 0;
  Settings() {
    const char* text = std::getenv("TESSERA_DELAYS");
    if (text == nullptr) return;
    if (std::sscanf(text, "%u,%ld,%u", &one_in, &microseconds, &seed) != 3 || microseconds < 1) {
      std::fprintf(stderr, "TESSERA_DELAYS is N,US,SEED and not %s\n", text);
      std::_Exit(2);
    }
  }
};

std::atomic<unsigned> threads = 0;
std::atomic<long> waits = 0;

const Settings& settings() {
  static const Settings read;
  return read;
}

// Not the main thread: libtorch takes thousands of locks as it begins and ends, alone.
void maybe_wait(unsigned weight) {
  const Settings& chosen = settings();
  thread_local const bool is_main = gettid() == getpid();
  if (chosen.one_in == 0 || is_main) return;
  thread_local std::minstd_rand random(chosen.seed + 7919 * ++threads);
  if (random() % (chosen.one_in * weight) != 0) return;
  const int error = errno;  // of the call before
  const long wait = static_cast<long>(random() % static_cast<unsigned long>(chosen.microseconds));
  const timespec time{wait / 1'000'000, wait % 1'000'000 * 1000};
  nanosleep(&time, nullptr);
  errno = error;
  ++waits;
}

struct Report {
  ~Report() {
    if (settings().one_in != 0) std::fprintf(stderr, "delays: %ld\n", waits.load());
  }
};
const Report kReport;

constexpr unsigned kLock = 10, kCall = 1;

// The function of that name which this library stands before, between two chances to wait.
template <typename Function>
class Delayed {
 public:
  Delayed(const char* name, unsigned weight)
      : function_(reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name))), weight_(weight) {}
  template <typename... Arguments>
  auto operator()(Arguments... arguments) const {
    maybe_wait(weight_);
    const auto result = function_(arguments...);
    maybe_wait(weight_);
    return result;
  }

 private:
  Function* function_;
  unsigned weight_;
};

}  // namespace

extern "C" {

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const Delayed<int(pthread_mutex_t*)> next("pthread_mutex_lock", kLock);
  return next(mutex);
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  static const Delayed<int(pthread_mutex_t*)> next("pthread_mutex_unlock", kLock);
  return next(mutex);
}
ssize_t read(int file, void* bytes, size_t count) {
  static const Delayed<ssize_t(int, void*, size_t)> next("read", kCall);
  return next(file, bytes, count);
}
ssize_t recv(int socket, void* bytes, size_t count, int flags) {
  static const Delayed<ssize_t(int, void*, size_t, int)> next("recv", kCall);
  return next(socket, bytes, count, flags);
}
ssize_t send(int socket, const void* bytes, size_t count, int flags) {
  static const Delayed<ssize_t(int, const void*, size_t, int)> next("send", kCall);
  return next(socket, bytes, count, flags);
}
ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  static const Delayed<ssize_t(int, const msghdr*, int)> next("sendmsg", kCall);
  return next(socket, message, flags);
}
ssize_t writev(int file, const iovec* pieces, int count) {
  static const Delayed<ssize_t(int, const iovec*, int)> next("writev", kCall);
  return next(file, pieces, count);
}
int close(int file) {
  static const Delayed<int(int)> next("close", kCall);
  return next(file);
}

}  // extern "C"
