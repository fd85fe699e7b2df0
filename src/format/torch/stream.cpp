#include "format/torch/stream.h"

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

#include "base/numbers.h"
#include "format/pickle/pickle.h"
#include "format/torch/rebuild.h"
#include "tessera/error.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

constexpr std::uint64_t kFirstWindow = 64 << 10;  // bytes read in the hope of a whole pickle
constexpr std::int64_t kProtocol = 1001;          // of the stream; there was never another
constexpr std::array<unsigned char, 10> kMagic = {0x6c, 0xfc, 0x9c, 0x46, 0xf9,
                                                  0x20, 0x6a, 0xa8, 0x50, 0x19};

constexpr std::uint64_t kMagicReach = 64;  // bytes that hold its pickle by any protocol

constexpr std::string_view kMagicText = "L119547037146038801333356L\n.";  // the same in digits

[[noreturn]] void fail(ErrorCode code, std::string what) {
  throw Error(code, std::move(what));
}

bool is_magic(const Value& value) {
  if (!value.is(Kind::integer)) return false;
  const std::vector<std::byte>& bytes = value.as_integer().big;
  return std::equal(bytes.begin(), bytes.end(), kMagic.begin(), kMagic.end(),
                    [](std::byte a, unsigned char b) { return a == std::byte{b}; });
}

// Before torch 0.4 tensors had neither gradients nor hooks: _rebuild_tensor(storage, offset, size,
// stride).
bool is_first_version(const Value& callable, const Value& arguments) {
  return callable.is(Kind::global) && callable.global_name() == "_rebuild_tensor" &&
         callable.global_module() == "torch._utils" && arguments.size() == 4;
}

bool rebuild_any(const Value& callable, const Value& arguments, Value& result) {
  if (!is_first_version(callable, arguments)) return rebuild_tensor(callable, arguments, result);
  Value::List items = arguments.items();
  items.emplace_back(false);
  items.push_back(Value::dict({}, DictKind::ordered_dict));
  return rebuild_tensor(Value::global("torch._utils", "_rebuild_tensor_v2"),
                        Value::tuple(std::move(items)), result);
}

// ("module", class, file, text)
bool is_class_with_source(const Value& id) {
  return id.is(Kind::tuple) && id.size() == 4 && id.items()[0] == Value("module");
}

// (key, offset, count)
bool is_view(const Value& view) {
  return view.is(Kind::tuple) && view.size() == 3 &&
         begin_with(view.items(), {Kind::string, Kind::integer, Kind::integer});
}

void require_little_endian(const Value& machine) {
  const Value* little = machine.is(Kind::dict) ? machine.find("little_endian") : nullptr;
  if (little == nullptr || !little->is(Kind::boolean)) {
    fail(ErrorCode::corrupt, "the stream does not say its byte order");
  }
  if (!little->as_bool()) fail(ErrorCode::unsupported, "a big-endian stream");
}

class StreamReader {
 public:
  StreamReader(std::shared_ptr<const ByteSource> source, bool keeps_compiler)
      : source_(std::move(source)), keeps_compiler_(keeps_compiler) {}

  Value run() {
    try {
      read_head();
      Value tree = next(true);
      place(next(false));
      return tree;
    } catch (Error& error) {
      throw error.at_offset(at_).at_path(source_->name());
    }
  }

 private:
  // The pickle at the cursor, which moves behind it.
  Value next(bool with_storages) {
    const std::uint64_t left = source_->size() - at_;
    for (std::uint64_t window = kFirstWindow;; window *= 8) {
      std::vector<std::byte> bytes(std::min({window, left, kPickleCap}));
      source_->read_at(at_, bytes);
      try {
        pickle::Parsed parsed =
            pickle::read(bytes, with_storages ? options_with_storages() : pickle::ReadOptions{});
        at_ += parsed.consumed;
        return std::move(parsed.value);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::incomplete || bytes.size() == left)
          throw Error(error.code(), error.message()).at_offset(at_ + error.offset().value_or(0));
        if (bytes.size() == kPickleCap) fail(ErrorCode::limit, "a pickle of more than 1 GiB");
      }
    }
  }

  pickle::ReadOptions options_with_storages() {
    storages_.clear();  // of a window that was too short
    views_.clear();
    pickle::ReadOptions options;
    options.keeps_compiler = keeps_compiler_;
    options.reduce = rebuild_any;
    options.persistent_load = [this](const Value& id) { return load(id); };
    return options;
  }

  void read_head();
  Value load(const Value& id);
  [[nodiscard]] Storage storage_of(const StorageId& id) const;
  Value view_of(const std::string& base_key, const Value& view);
  void place(const Value& keys);
  Storage& unplaced(const Value& key);
  void place_storage(const std::string& key, Storage& storage);
  void place_views();

  std::shared_ptr<const ByteSource> source_;
  bool keeps_compiler_;
  std::uint64_t at_ = 0;                             // of the next pickle or storage
  std::unordered_map<std::string, Value> storages_;  // bare leaves, by key
  struct View {
    Value leaf;
    std::string base;          // key of the storage that it is a part of
    std::uint64_t offset = 0;  // bytes
  };
  std::map<std::string, View> views_;  // by key
  IdStrings id_strings_;
};

// The format's number, its version, and the machine that wrote it.
void StreamReader::read_head() {
  if (!is_magic(next(false))) fail(ErrorCode::corrupt, "a pickle, but not one of torch.save");
  const Value protocol = next(false);
  if (protocol != Value(kProtocol)) {
    fail(ErrorCode::unsupported, "the stream's version is not 1001");
  }
  require_little_endian(next(false));
}

// Without the place of its bytes, which is only known behind the tree.
Storage StreamReader::storage_of(const StorageId& id) const {
  if (id.count < 0) fail(ErrorCode::corrupt, "a storage of negative size");
  Storage storage;
  storage.source = source_;
  storage.size =
      checked_mul<std::uint64_t>(static_cast<std::uint64_t>(id.count), size_of(id.kept.dtype));
  if (storage.size > source_->size()) {
    fail(ErrorCode::incomplete, "storage '" + id.key + "' has " + std::to_string(storage.size) +
                                    " bytes, the file " + std::to_string(source_->size()));
  }
  return storage;
}

// ("storage", class, key, location, count, view), or ("module", class, file, text) around a class
// whose source was kept.
Value StreamReader::load(const Value& id) {
  if (is_class_with_source(id)) return id.items()[1];
  StorageId parsed = parse_storage_id(id, 6);
  const std::string key = parsed.key;
  const Value view = id.items()[5];
  Value& known = storages_[key];
  if (known.is(Kind::none)) {
    Storage storage = storage_of(parsed);
    storage.id_strings = id_strings_.of(id);
    known = bare_storage(std::move(parsed), std::move(storage));
  } else {
    require_same_storage(known, parsed);
  }
  return view.is(Kind::none) ? known : view_of(key, view);
}

// (key, offset, count): a part of a storage that was a storage of its own.
Value StreamReader::view_of(const std::string& base_key, const Value& view) {
  if (!is_view(view))
    fail(ErrorCode::corrupt, "a view of a storage that is not (key, offset, count)");
  const Tensor& whole_storage = storages_.at(base_key).as_tensor();
  const std::string& key = view.items()[0].as_string();
  const std::int64_t offset = view.items()[1].as_int();
  const std::int64_t count = view.items()[2].as_int();
  if (offset < 0 || count < 0 || checked_add(offset, count) > whole_storage.shape[0]) {
    fail(ErrorCode::corrupt, "view '" + key + "' leaves its storage");
  }
  View& known = views_[key];
  if (!known.leaf.is(Kind::none)) return known.leaf;
  Tensor leaf = whole_storage;
  Storage storage = *leaf.pieces[0].storage;
  storage.size = static_cast<std::uint64_t>(count) * size_of(storage.dtype);
  leaf.shape = {count};
  leaf.pieces[0].slice = whole(leaf.shape);
  leaf.pieces[0].storage = std::make_shared<Storage>(std::move(storage));
  known.base = base_key;
  known.offset = static_cast<std::uint64_t>(offset) * size_of(leaf.dtype);
  known.leaf = Value(std::move(leaf));
  return known.leaf;
}

// The storages follow in the order of the list of keys, each a count and its bytes.
void StreamReader::place(const Value& keys) {
  if (!keys.is(Kind::list) || keys.size() != storages_.size()) {
    fail(ErrorCode::corrupt, "the list of storages is not that of the tree");
  }
  for (const Value& key : keys.items()) {
    Storage& storage = unplaced(key);
    place_storage(key.as_string(), storage);
  }
  if (at_ != source_->size()) {
    fail(ErrorCode::unsupported,
         std::to_string(source_->size() - at_) + " bytes follow the last storage");
  }
  place_views();
}

// The storage of this key, whose bytes have not come yet.
Storage& StreamReader::unplaced(const Value& key) {
  const auto found = key.is(Kind::string) ? storages_.find(key.as_string()) : storages_.end();
  if (found == storages_.end()) fail(ErrorCode::corrupt, "a storage that the tree does not name");
  Storage& storage = *found->second.as_tensor().pieces[0].storage;
  if (storage.offset != 0) fail(ErrorCode::corrupt, "a storage is listed twice");
  return storage;
}

// Views begin where the storages do that they are parts of.
void StreamReader::place_views() {
  for (auto& [key, view] : views_) {
    const Tensor& base = storages_.at(view.base).as_tensor();
    view.leaf.as_tensor().pieces[0].storage->offset = base.pieces[0].storage->offset + view.offset;
  }
}

void StreamReader::place_storage(const std::string& key, Storage& storage) {
  std::array<std::byte, 8> number{};
  source_->read_at(at_, number);
  const std::uint64_t count = storage.size / size_of(storage.dtype);
  if (load_le<std::uint64_t>(number.data()) != count) {
    fail(ErrorCode::corrupt, "storage '" + key + "' has " +
                                 std::to_string(load_le<std::uint64_t>(number.data())) +
                                 " elements, the tree says " + std::to_string(count));
  }
  at_ += number.size();
  if (storage.size > source_->size() - at_) {
    fail(ErrorCode::incomplete,
         "storage '" + key + "' of " + std::to_string(storage.size) + " bytes leaves the file");
  }
  storage.offset = at_;
  at_ += storage.size;
}

}  // namespace

bool is_stream(const ByteSource& source) {
  std::array<std::byte, 1> first{};
  if (source.size() == 0) return false;
  source.read_at(0, first);
  return first[0] == std::byte{0x80};
}

bool is_text_stream(const ByteSource& source) {
  std::array<std::byte, kMagicText.size()> start{};
  if (source.size() < start.size()) return false;
  source.read_at(0, start);
  return std::equal(start.begin(), start.end(), kMagicText.begin(),
                    [](std::byte a, char b) { return a == std::byte(b); });
}

bool has_magic(const ByteSource& source) {
  std::vector<std::byte> start(std::min<std::uint64_t>(source.size(), kMagicReach));
  source.read_at(0, start);
  const auto same = [](std::byte a, unsigned char b) { return a == std::byte{b}; };
  const auto digits = kMagicText.substr(1, 24);
  // Nearly all pickles are none: that is seen without reading them.
  if (std::search(start.begin(), start.end(), kMagic.begin(), kMagic.end(), same) == start.end() &&
      std::search(start.begin(), start.end(), digits.begin(), digits.end(), same) == start.end())
    return false;
  try {
    return is_magic(pickle::read(start).value);
  } catch (const Error&) {
    return false;
  }
}

Value read_stream(std::shared_ptr<const ByteSource> source, bool keeps_compiler) {
  return StreamReader(std::move(source), keeps_compiler).run();
}

}  // namespace tessera::torch_file
