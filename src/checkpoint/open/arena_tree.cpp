#include "checkpoint/open/arena_tree.h"

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/open/tensor_record.h"
#include "checkpoint/read/memory.h"
#include "format/pickle/pickle.h"
#include "io/source.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"

namespace tessera {

constexpr Encoding last_of(Encoding) {
  return Encoding::torch_item_zstd;
}

namespace {

constexpr std::uint32_t kArenaTreeDepth =
    2100;                              // of trees that a save has walked, and of the message
constexpr const char* kDict = "dict";  // the persistent id of one that has a state

class ArenaTreeEncoder {
 public:
  explicit ArenaTreeEncoder(ByteView arena) : arena_(arena) {}

  Bytes write(const Value& tree) {
    if (tree.is(Value::Kind::tensor)) number(tree.as_tensor());
    for (const InnerTensor& inner : inner_tensors(tree)) number(inner.tensor->as_tensor());
    pickle::WriteOptions options;
    options.protocol = 4;
    options.persistent_id = [this](const Value& value, Value& id) {
      if (value.is(Value::Kind::tensor)) {
        id = tensors_.id_of(value, true);
      } else if (has_lost_state(value)) {
        const auto dict = dicts_.try_emplace(value.identity(), dicts_.size()).first->second;
        id = Value::tuple({kDict, dict, Value::dict(value.pairs()), *value.container_state()});
      } else {
        return false;
      }
      return true;
    };
    const Bytes pickle = pickle::write(Value::tuple({strings_, tree}), options);
    MessageWriter message;
    message.count(storages_.size()).rest(records_.take()).rest(pickle);
    return message.take();
  }

 private:
  // Python's dicts have none, so pickle leaves it out.
  static bool has_lost_state(const Value& value) {
    return value.is(Value::Kind::dict) && value.dict_kind() == DictKind::dict &&
           value.container_state() != nullptr;
  }

  void number(const Tensor& tensor) {
    for (const Piece& piece : tensor.pieces) {
      if (!piece.storage || !numbers_.try_emplace(piece.storage.get(), storages_.size()).second)
        continue;
      storages_.push_back(piece.storage.get());
      add(*piece.storage);
    }
  }

  void add(const Storage& storage) {
    const bool is_here = storage.source == nullptr;
    records_.count(storage.size).value(is_here);
    if (!is_here) {
      Bytes bytes(static_cast<std::size_t>(storage.size));
      storage.source->read_at(storage.offset, bytes);
      records_.value(bytes);
    } else if (storage.size > 0) {
      records_.count(static_cast<std::uint64_t>(storage.data - arena_.data()));
    }
    records_.value(storage.encoding).value(storage.dtype).value(storage.crc32);
    records_.text(storage.location).text(storage.torch_class);
    const auto strings = storage.id_strings ? std::optional(*storage.id_strings) : std::nullopt;
    strings_.items().push_back(list_of(strings));
  }

  const ByteView arena_;
  std::map<const Storage*, std::uint64_t> numbers_;
  std::vector<const Storage*> storages_;  // by number
  MessageWriter records_;
  std::map<const void*, std::int64_t> dicts_;  // those with a state, by node
  Value strings_ = Value::list();              // Storage::id_strings of each
  TensorEncoder tensors_{[this](const Storage& storage, MessageWriter& message) {
    message.count(numbers_.at(&storage));
  }};
};

class ArenaTreeDecoder {
 public:
  ArenaTreeDecoder(ByteView message, std::uint64_t arena_bytes, const PlaceStorage& place)
      : message_(message), bytes_(message.size()), arena_bytes_(arena_bytes), place_(place) {}

  Value read() {
    const std::uint64_t storages = message_.count();
    if (storages > bytes_) throw Error(ErrorCode::corrupt, "more storages than bytes");
    storages_.resize(storages);
    for (auto& storage : storages_) storage = read_storage();
    pickle::ReadOptions options;
    options.max_depth = kArenaTreeDepth;
    options.keeps_compiler = true;
    options.persistent_load = [this](const Value& id) {
      return id.at(0).is(Value::Kind::string) ? dict_of(id) : tensor_of(id);
    };
    const Value all = pickle::read(message_.rest(), options).value;
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      if (const auto strings = only_of(all.at(0).items().at(i)))
        storages_[i]->id_strings = std::make_shared<const Value>(*strings);
    }
    return all.at(1);
  }

 private:
  Value tensor_of(const Value& id) {
    Value tensor = tensors_.tensor_of(id, true);
    require_readable(tensor.as_tensor(), "a tensor of a snapshot");
    return tensor;
  }

  Value dict_of(const Value& id) {
    Value& known = dicts_[id.at(1).as_int()];
    if (known.is(Value::Kind::dict)) return known;
    known = id.at(2);
    known.set_container_state(id.at(3));
    return known;
  }

  std::shared_ptr<Storage> read_storage() {
    static constinit std::byte nothing{};  // the memory of storages without bytes
    auto storage = std::make_shared<Storage>();
    storage->size = message_.count();
    if (!message_.value<bool>()) {
      storage->source = memory_source(message_.value<Bytes>(), "an item of a checkpoint");
    } else {
      const std::uint64_t begin = storage->size == 0 ? 0 : message_.count();
      if (begin > arena_bytes_ || storage->size > arena_bytes_ - begin)
        throw Error(ErrorCode::corrupt, "a tensor lies behind the end of its arena");
      place_(*storage, begin);
      if (!storage->source && storage->data == nullptr) storage->data = &nothing;
    }
    storage->encoding = message_.value<Encoding>();
    storage->dtype = message_.value<DType>();
    storage->crc32 = message_.value<std::optional<std::uint32_t>>();
    storage->location = message_.text();
    storage->torch_class = message_.text();
    return storage;
  }

  MessageReader message_;
  const std::uint64_t bytes_;  // of the message
  const std::uint64_t arena_bytes_;
  const PlaceStorage& place_;
  std::vector<std::shared_ptr<Storage>> storages_;  // by number
  std::map<std::int64_t, Value> dicts_;             // likewise
  TensorDecoder tensors_{[this](MessageReader& message) { return storages_.at(message.count()); }};
};

}  // namespace

Bytes with_head(const ArenaTreeHead& head, ByteView tree) {
  MessageWriter message;
  message.number(head.rank).number(head.size).text(head.writer).number(head.number);
  return message.rest(tree).take();
}

ArenaTreeHead take_head(ByteView& message) {
  MessageReader reader(message);
  ArenaTreeHead head;
  head.rank = reader.number<std::int32_t>();
  head.size = reader.number<std::int32_t>();
  head.writer = reader.text();
  head.number = reader.number<std::uint64_t>();
  message = reader.rest();
  return head;
}

Bytes message_of_tree(const Value& tree, ByteView arena) {
  return ArenaTreeEncoder(arena).write(tree);
}

Value tree_from_message(ByteView message, std::uint64_t arena_bytes, const PlaceStorage& place) {
  return ArenaTreeDecoder(message, arena_bytes, place).read();
}

}  // namespace tessera
