// What tests of saves in the background share: trees, groups that writers own, a store that waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_group.h"
#include "conformance/forwarding_store.h"
#include "tessera/checkpoint_writer.h"

namespace tessera::testing_support {

// Priority alone would make tests late on a machine whose processors are busy.
inline WriterOptions prompt(WriterOptions options = {}) {
  options.idle = false;
  return options;
}

// The group of run_ranks as one that a writer owns.
inline std::shared_ptr<Group> owned(Group& group) {
  return std::make_shared<ForwardingGroup>(group);
}

inline SaveOptions replacing() {
  SaveOptions options;
  options.overwrite = true;
  return options;
}

// A float tensor that a test changes.
inline Value numbers(std::int64_t count, float first) {
  Tensor tensor = counting({count}, whole({count}), first);
  tensor.sharded = false;
  return Value(std::move(tensor));
}

inline float* elements_of(Value& tree, const char* key) {
  return reinterpret_cast<float*>(tree.at(key).as_tensor().pieces.at(0).storage->data);
}

// Opens for all that wait at it.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    is_awaited_ = true;
    changed_.notify_all();
    wait_for_change(changed_, lock, [this] { return is_open_; });
  }
  // Until somebody has come to it.
  void await_somebody() {
    std::unique_lock lock(mutex_);
    wait_for_change(changed_, lock, [this] { return is_awaited_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  bool is_awaited_ = false;
};

// A store whose objects nobody makes before the gate is open, whatever else is asked of it.
class GatedStore final : public ForwardingStore {
 public:
  GatedStore(std::shared_ptr<Store> inner, std::shared_ptr<Gate> gate)
      : ForwardingStore(std::move(inner)), gate_(std::move(gate)) {}
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    gate_->pass();
    return ForwardingStore::create(name, if_exists, size_hint);
  }

 private:
  const std::shared_ptr<Gate> gate_;
};

// A place whose saves wait at a gate. A test opens it before a writer ends that waits for it; what
// is left behind goes on at the end of the test.
class GatedPlace {
 public:
  GatedPlace() = default;
  ~GatedPlace() { gate_->open(); }
  GatedPlace(const GatedPlace&) = delete;
  GatedPlace& operator=(const GatedPlace&) = delete;
  [[nodiscard]] Location where() const { return Location(gated_); }
  [[nodiscard]] const std::shared_ptr<Store>& inner() const { return store_; }
  [[nodiscard]] Gate& gate() const { return *gate_; }

 private:
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  const std::shared_ptr<Store> store_ = memory_store();
  const std::shared_ptr<Store> gated_ = std::make_shared<GatedStore>(store_, gate_);
};

// What stands at a key of the checkpoint there.
inline std::vector<float> floats_at(const Location& where, const std::string& key) {
  return floats(Checkpoint::open(where).load().at(key).as_tensor());
}

}  // namespace tessera::testing_support
