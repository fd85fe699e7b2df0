// A store that keeps the digests of what is written into it.
#pragma once

#include <mutex>
#include <string>

#include "checkpoint/digests/side_file.h"
#include "tessera/storage.h"

namespace tessera {

// Passes everything on to `store`, which must outlive it and its sinks. Used by several threads.
class DigestingStore final : public Store {
 public:
  explicit DigestingStore(Store& store) : store_(store) {}

  // Writes the side file of a directory: the digests of every object created and committed here,
  // but for `editable`, which people may change. Once, after the last commit.
  void write_side_file(const std::string& editable);

  [[nodiscard]] const std::string& name() const override { return store_.name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return store_.list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return store_.list_level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override { return store_.exists(name); }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return store_.open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override;
  void remove(std::string_view name) override;
  void remove_unfinished() override { store_.remove_unfinished(); }
  void sync() override { store_.sync(); }

 private:
  class Sink;

  Store& store_;
  std::mutex mutex_;
  DigestsByName digests_;  // guarded by mutex_
};

}  // namespace tessera
