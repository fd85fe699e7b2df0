// A catalog is the checkpoint's head, the files that pieces lie in, a record of each leaf, and one
// pickle with the values of all leaves and of the dicts around them.
#include "checkpoint/load/catalog_of.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/dcp/catalog.h"
#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/open/tensor_record.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/missing.h"
#include "comm/message.h"
#include "format/pickle/pickle.h"
#include "io/checked_source.h"
#include "io/source.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"

namespace tessera {

constexpr FileState last_of(FileState) {
  return FileState::not_understood;
}
auto fields(FieldsOf<FileRow> auto& row) {
  return std::tie(row.name, row.state, row.reason, row.size);
}

namespace {

constexpr std::uint32_t kMaxDepth = 2000;  // of trees that their own readers have bounded

class CatalogEncoder {
 public:
  CatalogEncoder(const Checkpoint& checkpoint, bool places)
      : checkpoint_(checkpoint), places_(places) {}

  Bytes write() {
    MessageWriter leaves;
    Value values = Value::list();
    for (const Leaf& leaf : checkpoint_.leaves) {
      add(leaf, leaves);
      values.items().push_back(leaf.value);
    }
    pickle::WriteOptions options;
    options.protocol = 4;
    options.persistent_id = [this](const Value& value, Value& id) {
      if (!value.is(Value::Kind::tensor)) return false;
      // Who is told elements has to know which of them nobody can tell.
      const bool has_places = places_ || std::ranges::any_of(value.as_tensor().pieces, is_missing);
      id = tensors_.id_of(value, has_places);
      return true;
    };
    const Bytes pickle = pickle::write(Value::list({values, containers_}), options);
    MessageWriter message;
    write_head(message);
    message.count(files_.size()).rest(file_records_.take());
    message.count(values.size()).rest(leaves.take()).rest(pickle);
    return message.take();
  }

 private:
  void write_head(MessageWriter& message) const {
    const Checkpoint& from = checkpoint_;
    const bool below = from.store && from.path.starts_with(from.store->name());
    message.number(from.kind).text(below ? from.path.substr(from.store->name().size()) : "");
    message.text(from.save_id).number(static_cast<std::int32_t>(from.world_size));
    message.value(from.warnings).count(from.has_types ? 1 : 0).count(places_ ? 1 : 0);
    message.value(from.remarks);
  }

  void add(const Leaf& leaf, MessageWriter& message) {
    message.text(leaf.name);
    write_path(message, leaf.path);
    message.count(leaf.containers ? leaf.containers->size() : 0);
    if (!leaf.containers) return;
    for (const auto& container : *leaf.containers) message.count(number_of(container.get()));
  }

  // From 1 up; 0: a plain dict.
  std::uint64_t number_of(const Container* container) {
    if (container == nullptr) return 0;
    const auto [at, fresh] = numbers_.try_emplace(container, numbers_.size() + 1);
    if (fresh) {
      containers_.items().push_back(
          Value::tuple({static_cast<int>(container->kind), list_of(container->state),
                        list_of(container->default_factory)}));
    }
    return at->second;
  }

  void write_storage(const Storage& storage, MessageWriter& message) {
    const auto [source, offset] = part_of(*storage.source);
    message.count(number_of(source)).count(offset + storage.offset).count(storage.size);
    message.number(storage.encoding).number(storage.dtype).value(storage.crc32);
  }

  // From 0 up. What is no file of the checkpoint has a record with its bytes: a value that was
  // decompressed, or less.
  std::uint64_t number_of(const ByteSource& source) {
    const auto [at, fresh] = files_.try_emplace(&source, files_.size());
    if (!fresh) return at->second;
    const auto* checked = dynamic_cast<const CheckedSource*>(&source);
    const auto* file = dynamic_cast<const LazySource*>(checked ? &checked->inner() : &source);
    const std::string directory = checkpoint_.store->name() + "/";
    if (file == nullptr || !file->name().starts_with(directory)) {
      write_file(file_records_, {});
      file_records_.text(source.name()).block(read_all(source, kValueCap));
      return at->second;
    }
    CatalogFile found{{file->name().substr(directory.size()), file->size()}};
    found.is_missing = file->is_missing();
    if (checked != nullptr) {
      found.digests = FileDigests{file->size(), checked->digests(), checked->origin()};
    } else if (const FileDigests* digests = digests_of(*file, found.info.name)) {
      found.digests = *digests;
    }
    write_file(file_records_, found);
    return at->second;
  }

  // A part of the checkpoint may be opened as a directory of its own.
  [[nodiscard]] const FileDigests* digests_of(const LazySource& file,
                                              const std::string& name) const {
    const FileDigests* digests = tessera::digests_of(file.store(), file.object().name);
    return digests != nullptr ? digests : tessera::digests_of(*checkpoint_.store, name);
  }

  const Checkpoint& checkpoint_;
  const bool places_;
  std::map<const ByteSource*, std::uint64_t> files_;  // their numbers
  MessageWriter file_records_;
  std::map<const Container*, std::uint64_t> numbers_;
  Value containers_ = Value::list();
  TensorEncoder tensors_{
      [this](const Storage& storage, MessageWriter& message) { write_storage(storage, message); }};
};

class CatalogDecoder {
 public:
  CatalogDecoder(ByteView catalog, const Place& at) : message_(catalog), at_(at) {}

  Checkpoint read() {
    Checkpoint made = read_head();
    read_files();
    std::vector<std::vector<std::uint64_t>> around(message_.count());
    made.leaves.resize(around.size());
    for (std::size_t i = 0; i < around.size(); ++i) {
      made.leaves[i].name = message_.text();
      made.leaves[i].path = read_path(message_);
      around[i].resize(message_.count());
      for (std::uint64_t& number : around[i]) number = message_.count();
    }
    pickle::ReadOptions options;
    options.max_depth = kMaxDepth;
    // What rank 0 tells, it tells leaf by leaf (tell.h).
    options.persistent_load = [this](const Value& id) { return tensors_.tensor_of(id, places_); };
    const Value all = pickle::read(message_.rest(), options).value;
    std::vector<std::shared_ptr<const Container>> containers = {nullptr};
    for (const Value& container : all.at(1).items()) containers.push_back(container_of(container));
    for (std::size_t i = 0; i < around.size(); ++i) {
      made.leaves[i].value = all.at(0).items()[i];
      if (around[i].empty()) continue;
      Containers found;
      for (const std::uint64_t number : around[i]) found.push_back(containers.at(number));
      made.leaves[i].containers = std::make_shared<const Containers>(std::move(found));
    }
    index_names(made);
    return made;
  }

 private:
  Checkpoint read_head() {
    Checkpoint made;
    made.kind = message_.number<CheckpointKind>();
    const std::string below = message_.text();
    made.path = at_.path.empty() ? at_.store->name() + below : at_.path;
    made.save_id = message_.text();
    made.world_size = message_.number<std::int32_t>();
    made.warnings = message_.value<std::vector<std::string>>();
    made.has_types = message_.count() == 1;
    places_ = message_.count() == 1;
    made.remarks = message_.value<std::vector<FileRow>>();
    made.store = at_.store;
    return made;
  }

  void read_files() {
    const auto digests = std::make_shared<DigestsByName>();
    // Who is told hears only of files that are missing.
    const auto store = guarded_store(at_.store ? at_.store : memory_store(at_.path), digests);
    const auto open = std::make_shared<OpenFiles>();
    for (auto count = message_.count(); count > 0; --count) {
      CatalogFile file = read_file(message_);
      if (file.info.name.empty()) {
        std::string name = message_.text();
        const ByteView bytes = message_.block();
        sources_.push_back(memory_source({bytes.begin(), bytes.end()}, std::move(name)));
        continue;
      }
      if (file.digests) digests->emplace(file.info.name, *std::move(file.digests));
      sources_.push_back(
          std::make_shared<LazySource>(store, std::move(file.info), file.is_missing, open));
    }
  }

  static std::shared_ptr<const Container> container_of(const Value& value) {
    return std::make_shared<const Container>(Container{static_cast<DictKind>(value.at(0).as_int()),
                                                       only_of(value.at(1)), only_of(value.at(2))});
  }

  std::shared_ptr<Storage> read_storage(MessageReader& message) const {
    auto storage = std::make_shared<Storage>();
    storage->source = sources_.at(message.count());
    storage->offset = message.count();
    storage->size = message.count();
    storage->encoding = message.number<Encoding>();
    storage->dtype = message.number<DType>();
    storage->crc32 = message.value<std::optional<std::uint32_t>>();
    return storage;
  }

  MessageReader message_;
  const Place& at_;
  bool places_ = false;
  std::vector<std::shared_ptr<const ByteSource>> sources_;  // by number
  TensorDecoder tensors_{[this](MessageReader& message) { return read_storage(message); }};
};

}  // namespace

Bytes catalog_of(const Checkpoint& checkpoint, bool places) {
  return CatalogEncoder(checkpoint, places).write();
}

Checkpoint opened_by(ByteView catalog, const Place& at) {
  return CatalogDecoder(catalog, at).read();
}

}  // namespace tessera
