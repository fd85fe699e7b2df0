#include "torch/deadline_store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/process.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Text = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;

// For a store to say that a wait with a timeout has ended.
constexpr milliseconds kGrace = std::chrono::seconds(1);

// A thread that does tasks one by one, and may be left behind in one.
class LeavableThread {
  using Clock = std::chrono::steady_clock;

 public:
  LeavableThread() : shared_(std::make_shared<Shared>()) {
    thread_ = std::thread([shared = shared_] { work(*shared); });
  }
  LeavableThread(const LeavableThread&) = delete;
  LeavableThread& operator=(const LeavableThread&) = delete;
  ~LeavableThread() {
    if (!made_) {  // there is no such thread in a child, and somebody may have locked the mutex
      static_cast<void>(new std::thread(std::move(thread_)));
      static_cast<void>(new std::shared_ptr(std::move(shared_)));
      return;
    }
    const bool is_idle = [&] {
      const std::lock_guard lock(shared_->mutex);
      shared_->is_over = true;
      return shared_->begun == shared_->ended;
    }();
    shared_->changed.notify_all();
    if (is_idle) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  // Waits until `task`, which throws nothing, has been done. Gives up after `limit`, or at once if
  // a task is under way that was given up: returns the limit that has passed. None: it is done.
  std::optional<milliseconds> run(std::function<void()> task, milliseconds limit) {
    require_own_connections(made_);
    auto& shared = *shared_;
    std::unique_lock lock(shared.mutex);
    const auto end = Clock::now() + limit;
    const auto becomes = [&](const auto& is_so) {
      if (limit != c10d::Store::kNoTimeout) return shared.changed.wait_until(lock, end, is_so);
      shared.changed.wait(lock, is_so);
      return true;
    };
    if (!becomes([&] { return shared.begun == shared.ended || shared.given_up; })) return limit;
    if (shared.given_up) return shared.given_up;
    shared.task = std::move(task);
    const auto number = ++shared.begun;
    shared.changed.notify_all();
    if (becomes([&] { return shared.ended >= number; })) return {};
    shared.given_up = limit;
    shared.changed.notify_all();
    return limit;
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> task;  // to be done next; empty: none
    std::uint64_t begun = 0, ended = 0;
    std::optional<milliseconds> given_up;  // the limit of the task under way, once it has passed
    bool is_over = false;
  };

  static void work(Shared& shared) {
    std::unique_lock lock(shared.mutex);
    for (;;) {
      shared.changed.wait(lock, [&] { return shared.task || shared.is_over; });
      if (!shared.task) return;
      auto task = std::exchange(shared.task, nullptr);
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      ++shared.ended;
      shared.given_up.reset();
      shared.changed.notify_all();
    }
  }

  std::shared_ptr<Shared> shared_;  // with the thread, which may stay when this goes
  std::thread thread_;
  MadeHere made_;
};

// Store::barrier is left as it is, which PrefixStore does too: it is made of the calls below.
class DeadlineStore final : public c10d::Store {
 public:
  DeadlineStore(std::string address, milliseconds timeout, std::function<StorePtr()> open)
      : Store(timeout), address_(std::move(address)) {
    store_ = finish(timeout == kNoTimeout ? timeout : timeout + kGrace, std::move(open));
  }

  StorePtr clone() override {
    auto copy = call([](Store& store) { return store.clone(); });
    return open_with_deadline(address_, timeout_, [copy] { return copy; });
  }

  using Store::set;
  void set(const std::string& key, const Text& value) override {
    call([=](Store& store) { store.set(key, value); });
  }
  using Store::compareSet;
  Text compareSet(const std::string& key, const Text& expected, const Text& desired) override {
    return call([=](Store& store) { return store.compareSet(key, expected, desired); });
  }
  // Waits as long as this store says, and not as the one in it does.
  Text get(const std::string& key) override {
    return call_that_waits(timeout_, [key, timeout = timeout_](Store& store) {
      store.wait({key}, timeout);
      return store.get(key);
    });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return call([=](Store& store) { return store.add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return call([=](Store& store) { return store.deleteKey(key); });
  }
  bool check(const Keys& keys) override {
    return call([=](Store& store) { return store.check(keys); });
  }
  std::int64_t getNumKeys() override {
    return call([](Store& store) { return store.getNumKeys(); });
  }
  void wait(const Keys& keys) override { wait(keys, timeout_); }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    call_that_waits(timeout, [=](Store& store) { store.wait(keys, timeout); });
  }

  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  void append(const std::string& key, const Text& value) override {
    call([=](Store& store) { store.append(key, value); });
  }
  std::vector<Text> multiGet(const Keys& keys) override {
    return call_that_waits(timeout_, [keys, timeout = timeout_](Store& store) {
      store.wait(keys, timeout);
      return store.multiGet(keys);
    });
  }
  void multiSet(const Keys& keys, const std::vector<Text>& values) override {
    call([=](Store& store) { store.multiSet(keys, values); });
  }
  void queuePush(const std::string& key, const Text& value) override {
    call([=](Store& store) { store.queuePush(key, value); });
  }
  Text queuePop(const std::string& key, bool block) override {
    return call_that_waits(timeout_, [=](Store& store) { return store.queuePop(key, block); });
  }
  std::int64_t queueLen(const std::string& key) override {
    return call([=](Store& store) { return store.queueLen(key); });
  }
  Keys listKeys() override {
    return call([](Store& store) { return store.listKeys(); });
  }

 private:
  // What is called outlives a caller that gives up: it holds copies.
  template <typename Work>
  std::invoke_result_t<Work, Store&> call(Work work) {
    return finish(timeout_, [store = store_, work = std::move(work)] { return work(*store); });
  }
  template <typename Work>
  std::invoke_result_t<Work, Store&> call_that_waits(milliseconds timeout, Work work) {
    return finish(timeout == kNoTimeout ? timeout : timeout + kGrace,
                  [store = store_, work = std::move(work)] { return work(*store); });
  }

  template <typename Work>
  std::invoke_result_t<Work> finish(milliseconds limit, Work work) {
    using Task = std::packaged_task<std::invoke_result_t<Work>()>;
    // Shared with the thread, which may be left behind.
    const auto task = std::make_shared<Task>(std::move(work));
    auto result = task->get_future();
    if (const auto passed = thread_.run([task] { (*task)(); }, limit)) {
      C10_THROW_ERROR(DistNetworkError, "the store where ranks meet (" + address_ +
                                            ") timed out: it has not answered within " +
                                            std::to_string(passed->count()) + " ms");
    }
    try {
      return result.get();
    } catch (c10::DistNetworkError& error) {
      error.add_context("the store where ranks meet, " + address_);
      throw;
    }
  }

  std::string address_;
  StorePtr store_;
  LeavableThread thread_;
};

}  // namespace

StorePtr open_with_deadline(std::string address, milliseconds timeout,
                            std::function<StorePtr()> open) {
  return c10::make_intrusive<DeadlineStore>(std::move(address), timeout, std::move(open));
}

StorePtr with_deadline(const StorePtr& store, milliseconds deadline) {
  const auto part = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
  const auto whole = part ? part->getUnderlyingNonPrefixStore() : store;
  const auto served = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(whole);
  if (!served) return store;
  return open_with_deadline(served->getHost() + ":" + std::to_string(served->getPort()), deadline,
                            [store] { return store; });
}

}  // namespace tessera
