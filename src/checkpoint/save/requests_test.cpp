// What a save asks of a store that answers each request late: how many in turn, and what at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/test_support.h"
#include "storage/forwarding_store.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// Requests in the order of their begin. A round begins with a request while no other one is under
// way.
class Rounds {
 public:
  // `meeting`: of how many requests of this name; they end when all of them have begun.
  void expect_at_once(const std::string& meeting, int requests) { expected_[meeting] = requests; }

  void begin(const std::string& request, const std::string& meeting) {
    std::unique_lock lock(mutex_);
    if (under_way_++ == 0) rounds_.emplace_back();
    rounds_.back().push_back(request);
    ++begun_[meeting];
    changed_.notify_all();
    const auto have_met = [&] { return begun_[meeting] >= expected_[meeting]; };
    if (!changed_.wait_for(lock, std::chrono::seconds(10), have_met)) alone_.push_back(request);
  }
  void end() {
    const std::lock_guard lock(mutex_);
    --under_way_;
  }

  [[nodiscard]] const std::vector<std::vector<std::string>>& rounds() const { return rounds_; }
  [[nodiscard]] const std::vector<std::string>& alone() const { return alone_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int under_way_ = 0;
  std::map<std::string, int> expected_, begun_;
  std::vector<std::vector<std::string>> rounds_;
  std::vector<std::string> alone_;  // that waited for another one in vain
};

class Request {
 public:
  Request(Rounds& rounds, const std::string& name, const std::string& meeting) : rounds_(rounds) {
    rounds.begin(name, meeting);
  }
  ~Request() { rounds_.end(); }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

 private:
  Rounds& rounds_;
};

std::string kind_of(std::string_view name) {
  if (name.ends_with(".json")) return "side file";
  return name.ends_with(".distcp") ? "data" : std::string(name);
}

class LateSink final : public ByteSink {
 public:
  LateSink(std::unique_ptr<ByteSink> sink, std::string kind, Rounds& rounds)
      : sink_(std::move(sink)), kind_(std::move(kind)), rounds_(rounds) {}
  void write_at(std::uint64_t offset, ByteView bytes) override { sink_->write_at(offset, bytes); }
  void commit() override {
    const Request request(rounds_, "PUT " + kind_, kind_ == "side file" ? "second" : kind_);
    sink_->commit();
  }
  [[nodiscard]] const std::string& name() const override { return sink_->name(); }

 private:
  const std::unique_ptr<ByteSink> sink_;
  const std::string kind_;
  Rounds& rounds_;
};

// As an object store that was tried: each call but create() is a request.
class LateStore final : public ForwardingStore {
 public:
  LateStore(std::shared_ptr<Store> inner, Rounds& rounds)
      : ForwardingStore(std::move(inner)), rounds_(rounds) {}

  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    const Request request(rounds_, "LIST", lists_++ == 0 ? "first" : "second");
    return ForwardingStore::list_level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    const Request request(rounds_, "HEAD " + kind_of(name), "first");
    return ForwardingStore::exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const Request request(rounds_, "HEAD " + kind_of(name), "first");
    return ForwardingStore::open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return std::make_unique<LateSink>(ForwardingStore::create(name, if_exists, size_hint),
                                      kind_of(name), rounds_);
  }
  void remove(std::string_view name) override {
    const Request request(rounds_, "DELETE " + kind_of(name), "none");
    ForwardingStore::remove(name);
  }

 private:
  Rounds& rounds_;
  mutable std::atomic<int> lists_ = 0;
};

// There were eleven.
TEST(SaveRequests, AreFourInTurn) {
  Rounds rounds;
  rounds.expect_at_once("first", 2);
  rounds.expect_at_once("second", 2);
  const auto store = memory_store();
  const Value tree = Value::dict({{"n", 1}, {"w", Value(counting({6}, chunk({6}, 0, 1), 3))}});
  save(tree, std::make_shared<LateStore>(store, rounds), {.threads = 1});
  EXPECT_TRUE(rounds.alone().empty()) << rounds.alone().front();
  auto found = rounds.rounds();
  for (auto& round : found) std::ranges::sort(round);
  EXPECT_EQ(
      found,
      (std::vector<std::vector<std::string>>{
          {"HEAD .metadata", "LIST"}, {"PUT data"}, {"LIST", "PUT side file"}, {"PUT .metadata"}}));
  EXPECT_TRUE(Checkpoint::open(Location(store)).load().is(Value::Kind::dict));
}

}  // namespace
}  // namespace tessera
