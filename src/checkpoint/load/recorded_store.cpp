#include "checkpoint/load/recorded_store.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/load/opened.h"
#include "comm/message.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kMostRead = 256 << 20;  // bytes

template <class Answer>
using ByName = std::map<std::string, Answer, std::less<>>;

struct RecordedObject {
  std::uint64_t size = 0;
  bool checked = false;
  std::map<std::uint64_t, Bytes> reads;  // by offset
};

// Answers that several threads add.
struct Record {
  std::mutex mutex;  // guards everything below
  bool ended = false;
  std::size_t read = 0;  // bytes
  ByName<std::vector<ObjectInfo>> lists, levels;
  ByName<bool> exists;
  ByName<RecordedObject> objects;

  template <class Note>
  void add(const Note& note) {
    const std::lock_guard lock(mutex);
    if (!ended) note();
  }
};

class RecordingSource final : public ByteSource {
 public:
  RecordingSource(std::shared_ptr<ByteSource> source, std::shared_ptr<Record> record,
                  std::string name)
      : source_(std::move(source)), record_(std::move(record)), key_(std::move(name)) {}

  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return source_->request_cost(); }
  [[nodiscard]] bool checked() const override { return source_->checked(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    source_->read_at(offset, out);
    note(offset, out);
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    source_->read_ranges(ranges);
    for (const ReadRange& range : ranges) note(range.offset, range.out);
  }

 private:
  void note(std::uint64_t offset, ByteView bytes) const {
    record_->add([&] {
      if (bytes.size() > kMostRead - record_->read) return;
      Bytes& kept = record_->objects[key_].reads[offset];
      if (kept.size() >= bytes.size()) return;
      record_->read += bytes.size() - kept.size();
      kept.assign(bytes.begin(), bytes.end());
    });
  }

  std::shared_ptr<ByteSource> source_;
  std::shared_ptr<Record> record_;
  std::string key_;
};

void write_list(MessageWriter& message, const ByName<std::vector<ObjectInfo>>& lists) {
  message.count(lists.size());
  for (const auto& [prefix, files] : lists) {
    message.text(prefix).count(files.size());
    for (const ObjectInfo& file : files) message.text(file.name).count(file.size);
  }
}

ByName<std::vector<ObjectInfo>> read_list(MessageReader& message) {
  ByName<std::vector<ObjectInfo>> lists;
  for (auto count = message.count(); count > 0; --count) {
    auto& files = lists[message.text()];
    files.resize(message.count());
    for (ObjectInfo& file : files) {
      file.name = message.text();
      file.size = message.count();
    }
  }
  return lists;
}

Bytes encode(const Record& record) {
  MessageWriter message;
  write_list(message, record.lists);
  write_list(message, record.levels);
  message.count(record.exists.size());
  for (const auto& [name, there] : record.exists) message.text(name).count(there ? 1 : 0);
  message.count(record.objects.size());
  for (const auto& [name, object] : record.objects) {
    message.text(name).count(object.size).count(object.checked ? 1 : 0);
    message.count(object.reads.size());
    for (const auto& [offset, bytes] : object.reads) message.count(offset).block(bytes);
  }
  return message.take();
}

class Recorder final : public RecordingStore {
 public:
  explicit Recorder(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  [[nodiscard]] const std::string& name() const override { return store_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    std::vector<ObjectInfo> files = store_->list(prefix);
    record_->add([&] { record_->lists[std::string(prefix)] = files; });
    return files;
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    std::vector<ObjectInfo> files = store_->list_level(prefix);
    record_->add([&] { record_->levels[std::string(prefix)] = files; });
    return files;
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    const bool there = store_->exists(name);
    record_->add([&] { record_->exists[std::string(name)] = there; });
    return there;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    std::shared_ptr<ByteSource> source = store_->open(name);
    record_->add([&] {
      RecordedObject& object = record_->objects[std::string(name)];
      object.size = source->size();
      object.checked = source->checked();
    });
    return std::make_shared<RecordingSource>(std::move(source), record_, std::string(name));
  }
  std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                   std::uint64_t size_hint) override {
    return store_->create(name, if_exists, size_hint);
  }
  void remove(std::string_view name) override { store_->remove(name); }

  Bytes finish() override {
    const std::lock_guard lock(record_->mutex);
    record_->ended = true;
    Bytes bytes = encode(*record_);
    record_->objects.clear();
    return bytes;
  }

 private:
  std::shared_ptr<Store> store_;
  std::shared_ptr<Record> record_ = std::make_shared<Record>();
};

struct ReplayedObject {
  std::uint64_t size = 0;
  bool checked = false;
  std::map<std::uint64_t, ByteView> reads;  // by offset
};

class ReplayedSource final : public ByteSource {
 public:
  ReplayedSource(std::shared_ptr<const Store> store, const std::string& name,
                 std::shared_ptr<const ReplayedObject> object)
      : rest_(std::move(store), {name, object->size}), object_(std::move(object)) {}

  [[nodiscard]] std::uint64_t size() const override { return object_->size; }
  [[nodiscard]] const std::string& name() const override { return rest_.name(); }
  [[nodiscard]] bool checked() const override { return object_->checked; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    if (const auto known = recorded(offset, out.size())) {
      std::ranges::copy(*known, out.begin());
    } else {
      rest_.read_at(offset, out);
    }
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    std::vector<ReadRange> others;
    for (const ReadRange& range : ranges) {
      if (const auto known = recorded(range.offset, range.out.size())) {
        std::ranges::copy(*known, range.out.begin());
      } else {
        others.push_back(range);
      }
    }
    if (!others.empty()) rest_.read_ranges(others);
  }

 private:
  std::optional<ByteView> recorded(std::uint64_t offset, std::size_t size) const {
    auto read = object_->reads.upper_bound(offset);
    if (read == object_->reads.begin()) return std::nullopt;
    --read;
    const std::uint64_t within = offset - read->first;
    const ByteView bytes = read->second;
    if (within > bytes.size() || size > bytes.size() - within) return std::nullopt;
    return bytes.subspan(static_cast<std::size_t>(within), size);
  }

  LazySource rest_;  // this rank's own object
  std::shared_ptr<const ReplayedObject> object_;
};

class Replayer final : public Store {
 public:
  Replayer(std::shared_ptr<Store> store, Replay replay)
      : store_(std::move(store)),
        patient_(patient_store(store_, std::move(replay.stop), std::move(replay.is_replaced))) {
    MessageReader message(replay.record);
    lists_ = read_list(message);
    levels_ = read_list(message);
    note_names(lists_);
    note_names(levels_);
    for (auto count = message.count(); count > 0; --count) {
      const std::string name = message.text();
      exists_[name] = message.count() == 1;
    }
    for (auto count = message.count(); count > 0; --count) {
      const auto object = std::make_shared<ReplayedObject>();
      objects_[message.text()] = object;
      object->size = message.count();
      object->checked = message.count() == 1;
      for (auto reads = message.count(); reads > 0; --reads) {
        const std::uint64_t offset = message.count();
        object->reads.emplace(offset, message.block());
      }
    }
  }

  [[nodiscard]] const std::string& name() const override { return store_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    const auto known = lists_.find(prefix);
    return known == lists_.end() ? store_->list(prefix) : known->second;
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    const auto known = levels_.find(prefix);
    return known == levels_.end() ? store_->list_level(prefix) : known->second;
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    const auto known = exists_.find(name);
    return known == exists_.end() ? store_->exists(name) : known->second;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const auto known = objects_.find(name);
    if (known == objects_.end())
      return names_.contains(name) ? patient_->open(name) : store_->open(name);
    return std::make_shared<ReplayedSource>(patient_, known->first, known->second);
  }
  std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                   std::uint64_t size_hint) override {
    return store_->create(name, if_exists, size_hint);
  }
  void remove(std::string_view name) override { store_->remove(name); }

 private:
  void note_names(const ByName<std::vector<ObjectInfo>>& lists) {
    for (const auto& [prefix, files] : lists)
      for (const ObjectInfo& file : files) names_.insert(file.name);
  }

  std::shared_ptr<Store> store_;
  std::shared_ptr<Store> patient_;  // for what is known to be there
  std::set<std::string, std::less<>> names_;
  ByName<std::vector<ObjectInfo>> lists_, levels_;
  ByName<bool> exists_;
  ByName<std::shared_ptr<const ReplayedObject>> objects_;
};

}  // namespace

std::shared_ptr<RecordingStore> recording_store(std::shared_ptr<Store> store) {
  return std::make_shared<Recorder>(std::move(store));
}

std::shared_ptr<Store> replaying_store(std::shared_ptr<Store> store, Replay replay) {
  return std::make_shared<Replayer>(std::move(store), std::move(replay));
}

}  // namespace tessera
