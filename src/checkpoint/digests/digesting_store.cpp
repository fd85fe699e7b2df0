#include "checkpoint/digests/digesting_store.h"

#include <span>
#include <utility>

#include "io/block_digests.h"

namespace tessera {

class DigestingStore::Sink final : public ByteSink {
 public:
  Sink(DigestingStore& store, std::string object, std::unique_ptr<ByteSink> sink)
      : store_(store), object_(std::move(object)), sink_(std::move(sink)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override { sink_.write_at(offset, bytes); }
  void keep_at(std::uint64_t offset, ByteView bytes) override { sink_.keep_at(offset, bytes); }
  void commit() override {
    sink_.commit();
    FileDigests file{sink_.size(), sink_.digests(), 0};
    const std::lock_guard lock(store_.mutex_);
    store_.digests_[object_] = std::move(file);
  }
  [[nodiscard]] const std::string& name() const override { return sink_.name(); }

 private:
  DigestingStore& store_;
  std::string object_;
  DigestSink sink_;
};

std::unique_ptr<ByteSink> DigestingStore::create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) {
  return std::make_unique<Sink>(*this, std::string(name),
                                store_.create(name, if_exists, size_hint));
}

void DigestingStore::remove(std::string_view name) {
  store_.remove(name);
  const std::lock_guard lock(mutex_);
  digests_.erase(std::string(name));
}

void DigestingStore::write_side_file(const std::string& editable) {
  const std::lock_guard lock(mutex_);
  digests_.erase(editable);
  const std::string text = encode_side_file({"", own_producer(), digests_});
  put(store_, kDirectorySideFile, std::as_bytes(std::span(text.data(), text.size())),
      IfExists::fail);
}

}  // namespace tessera
