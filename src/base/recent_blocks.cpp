#include "base/recent_blocks.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <utility>

#include "base/parallel.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(50);  // until a stop is looked for

// Whoever catches an Error adds to it where it stands, so no two threads may have one: a copy.
std::exception_ptr copy_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return std::make_exception_ptr(Error(error));
  } catch (...) {
    return failure;
  }
}

bool is_ready(const std::shared_future<RecentBlocks::Bytes>& bytes) {
  return bytes.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

RecentBlocks::Claim::Claim(RecentBlocks& blocks, Key key, std::promise<Bytes> promise)
    : blocks_(&blocks), key_(key), promise_(std::move(promise)) {}

RecentBlocks::Claim::Claim(Claim&& other) noexcept
    : blocks_(std::exchange(other.blocks_, nullptr)),
      key_(other.key_),
      promise_(std::move(other.promise_)) {}

RecentBlocks::Claim::~Claim() {
  if (blocks_ == nullptr) return;
  blocks_->forget(key_);
  promise_.set_value(nullptr);
}

void RecentBlocks::Claim::fail(const std::exception_ptr& failure) {
  if (blocks_ == nullptr) return;
  std::exchange(blocks_, nullptr)->forget(key_);
  promise_.set_exception(copy_of(failure));
}

void RecentBlocks::Claim::keep(Bytes bytes) {
  blocks_ = nullptr;
  promise_.set_value(std::move(bytes));
}

// Null: nothing is known of the block. Call it with the mutex locked.
RecentBlocks::Entry* RecentBlocks::use(Key key) {
  const auto found = std::ranges::find(recent_, key, &Entry::key);
  if (found == recent_.end()) return nullptr;
  if (!found->reader && !is_ready(found->bytes)) {
    recent_.erase(found);
    return nullptr;
  }
  recent_.splice(recent_.begin(), recent_, found);
  return &recent_.front();
}

RecentBlocks::Known RecentBlocks::known_of(const Entry& entry) {
  if (!is_ready(entry.bytes)) return {nullptr, true};
  return {entry.bytes.get(), false};  // whoever fails forgets the entry first
}

RecentBlocks::Known RecentBlocks::find(Key key) {
  const std::lock_guard lock(mutex_);
  const Entry* entry = use(key);
  return entry == nullptr ? Known() : known_of(*entry);
}

RecentBlocks::Known RecentBlocks::find(Key key, std::optional<Claim>& claim) {
  const std::lock_guard lock(mutex_);
  if (const Entry* entry = use(key)) return known_of(*entry);
  std::promise<Bytes> promise;
  recent_.push_front({.key = key, .bytes = promise.get_future().share()});
  claim.emplace(*this, key, std::move(promise));
  if (recent_.size() > most_) recent_.pop_back();  // who waits for it has it all the same
  return {};
}

std::shared_future<RecentBlocks::Bytes> RecentBlocks::future_of(Key key) {
  const std::lock_guard lock(mutex_);
  const Entry* entry = use(key);
  return entry == nullptr ? std::shared_future<Bytes>() : entry->bytes;
}

RecentBlocks::Bytes RecentBlocks::wait_for(Key key) {
  const std::shared_future<Bytes> bytes = future_of(key);
  if (!bytes.valid()) return nullptr;
  while (bytes.wait_for(kPatience) != std::future_status::ready) {
    if (HeedStop::is_requested()) throw_cancelled();
  }
  try {
    return bytes.get();
  } catch (const Error& error) {
    // The same for all who wait, a copy for each.
    if (error.code() != ErrorCode::cancelled || HeedStop::is_requested()) throw Error(error);
    return nullptr;
  }
}

RecentBlocks::Bytes RecentBlocks::get(Key key, const std::function<Bytes()>& read) {
  while (true) {
    std::optional<Claim> claim;
    Known known = find(key, claim);
    if (claim) {
      Bytes bytes;
      try {
        bytes = read();
      } catch (...) {
        claim->fail(std::current_exception());
        throw;
      }
      claim->keep(bytes);
      return bytes;
    }
    if (known.bytes || (known.bytes = wait_for(key))) return known.bytes;
  }
}

std::shared_ptr<std::vector<std::byte>> RecentBlocks::room(std::size_t size) {
  std::unique_ptr<std::vector<std::byte>> memory;
  {
    const std::lock_guard lock(spare_->mutex);
    if (!spare_->memory.empty()) {
      memory = std::move(spare_->memory.back());
      spare_->memory.pop_back();
    }
  }
  if (!memory) memory = std::make_unique<std::vector<std::byte>>();
  memory->resize(size);
  return {memory.release(), [spare = spare_](std::vector<std::byte>* gone) {
            std::unique_ptr<std::vector<std::byte>> freed(gone);
            const std::lock_guard lock(spare->mutex);
            if (spare->memory.size() < spare->most) spare->memory.push_back(std::move(freed));
          }};
}

void RecentBlocks::took(Key key, bool begin, bool end) {
  const std::lock_guard lock(mutex_);
  Entry* entry = use(key);
  if (entry == nullptr) return;
  entry->is_begun = entry->is_begun || begin;
  entry->is_ended = entry->is_ended || end;
  if (entry->is_begun && entry->is_ended) recent_.pop_front();
}

void RecentBlocks::forget(Key key) {
  const std::lock_guard lock(mutex_);
  std::erase_if(recent_, [key](const Entry& entry) { return entry.key == key; });
}

SharedBlocks::SharedBlocks(std::size_t most)
    : blocks_(most), outer_(std::exchange(thread_job().blocks, &blocks_)) {}

SharedBlocks::~SharedBlocks() {
  thread_job().blocks = outer_;
}

RecentBlocks* SharedBlocks::here() noexcept {
  return thread_job().blocks;
}

}  // namespace tessera
