#include "heap.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> in_use{0};  // bytes of the heap
std::atomic<std::int64_t> most{0};

void count(std::int64_t bytes) {
  const std::int64_t now = in_use += bytes;
  std::int64_t before = most;
  while (before < now && !most.compare_exchange_weak(before, now)) {
  }
}

}  // namespace

void* operator new(std::size_t size) {
  void* const made = std::malloc(size);
  if (made == nullptr) throw std::bad_alloc();
  count(static_cast<std::int64_t>(malloc_usable_size(made) + sizeof(std::size_t)));
  return made;
}

void operator delete(void* gone) noexcept {
  if (gone == nullptr) return;
  count(-static_cast<std::int64_t>(malloc_usable_size(gone) + sizeof(std::size_t)));
  std::free(gone);
}

void operator delete(void* gone, std::size_t /*size*/) noexcept {
  operator delete(gone);
}

namespace tessera {

std::int64_t heap_height_of(const std::function<void()>& work) {
  const std::int64_t before = in_use;
  most = before;
  work();
  return most - before;
}

}  // namespace tessera
