// Checkpoints of all kinds for the tests of runs and uploads, and a store that dies.
#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/open/kinds.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "conformance/store_maker.h"
#include "io/testing.h"
#include "tessera/run_directory.h"

namespace tessera::testing_support {

// A DCP checkpoint of rows of 32 bytes, whose elements count from `first`.
inline void save_step(const Location& where, float first, std::int64_t rows = 64) {
  Value tree = Value::dict();
  Tensor tensor = counting({rows, 8}, whole({rows, 8}), first);
  tensor.sharded = false;
  tree.set_item("weight", Value(std::move(tensor)));
  tree.set_item("step", static_cast<std::int64_t>(first));
  SaveOptions options;
  options.threads = 1;  // one data file
  (void)save(tree, where, options);
}

inline const std::vector<CheckpointKind>& marked_kinds() {
  static const std::vector<CheckpointKind> kinds{
      CheckpointKind::dcp, CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
      CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};
  return kinds;
}

// A directory with FSDP's own training of two ranks as a checkpoint of this kind; made once, by
// whichever rank asks first.
inline std::string written(CheckpointKind kind) {
  static std::mutex mutex;
  static std::map<CheckpointKind, std::string> made;
  const std::lock_guard lock(mutex);
  const auto known = made.find(kind);
  if (known != made.end()) return known->second;
  const std::string golden =
      std::string(TESSERA_TEST_DATA) + "/golden/fsdp1_uop1_ws2/model_and_optim";
  const std::string directory = temporary_directory();
  write_text(directory + "/config.yaml", "run_name: test\n");
  ConvertOptions options;
  options.to = kind;
  options.ranks = row_of(kind).is_split ? 2 : 1;
  if (kind == CheckpointKind::olmo_local) options.olmo.unit = "l[0-9]+";
  if (kind != CheckpointKind::dcp) options.olmo.config = directory + "/config.yaml";
  (void)convert(golden, directory + "/c", options);
  return made[kind] = directory + "/c";
}

// Copies all objects, in the order of their names.
inline void copy_objects(const std::shared_ptr<Store>& from, Store& to,
                         const std::string& below = {}) {
  for (const ObjectInfo& object : from->list())
    put(to, below + object.name, read_all(*from->open(object.name), 1 << 24), IfExists::replace);
}

// A store that, as if its process was killed, answers no call after the first `calls`. Counts what
// changes something only, or everything.
class DyingStore final : public testing_support::ForwardingStore {
 public:
  enum class Counts : std::uint8_t { changes, everything };
  DyingStore(std::shared_ptr<Store> inner, std::uint64_t calls, Counts counts = Counts::changes)
      : ForwardingStore(std::move(inner)),
        counts_(counts),
        fault_(std::make_shared<Fault>(ErrorCode::io, calls)) {}

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    look();
    return ForwardingStore::list(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    look();
    return ForwardingStore::exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    look();
    auto source = ForwardingStore::open(name);
    if (counts_ == Counts::changes) return source;
    return std::make_shared<FaultySource>(std::move(source), fault_);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    fault_->pass(std::string(name), 0);
    return std::make_unique<FaultySink>(ForwardingStore::create(name, if_exists, size_hint),
                                        fault_);
  }
  void remove(std::string_view name) override {
    fault_->pass(std::string(name), 0);
    ForwardingStore::remove(name);
  }
  void sync() override {
    fault_->pass("sync", 0);
    ForwardingStore::sync();
  }

 private:
  void look() const {
    if (counts_ == Counts::everything) fault_->pass("look", 0);
  }

  Counts counts_;
  std::shared_ptr<Fault> fault_;
};

using Contents = std::map<std::string, std::vector<std::byte>>;

inline Contents contents_of(const Store& store) {
  Contents contents;
  for (const ObjectInfo& object : store.list())
    contents[object.name] = read_all(*store.open(object.name), 1 << 26);
  return contents;
}

// Whether somebody who asks for the marker finds one.
inline bool is_marked(const Store& store) {
  return store.exists(".metadata") || store.exists("config.yaml");
}

// The places where a run may lie: a path, a store, a directory of a store.
inline std::vector<Location> empty_runs() {
  return {temporary_directory() + "/run", memory_store(), {memory_store(), "some/run"}};
}

}  // namespace tessera::testing_support
