#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "format/pickle/pickle.h"
#include "format/torch/names.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"
#include "tessera/error.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

constexpr std::uint64_t kPickleCap = 1U << 30;  // bytes
constexpr std::uint64_t kTextCap = 64;          // bytes of version and byteorder
constexpr std::uint64_t kNewestVersion = 10;    // of the archive format, as PyTorch reads
constexpr std::array<unsigned char, 15> kLegacyMagic = {
    0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e};
constexpr std::uint64_t kTarMagicOffset = 257;

[[noreturn]] void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

bool is_global(const Value& value, std::string_view module, std::string_view name) {
  return value.is(Kind::global) && value.global_module() == module && value.global_name() == name;
}

// Says what a file is that is not a readable zip archive; returns when it has nothing better to
// say.
void explain_other_format(const ByteSource& source) {
  std::array<std::byte, kTarMagicOffset + 5> start{};
  const std::size_t size = std::min<std::uint64_t>(source.size(), start.size());
  source.read_at(0, MutableByteView(start).first(size));
  const auto fail = [&](ErrorCode code, const char* what) {
    throw Error(code, what).at_path(source.name());
  };
  if (std::memcmp(start.data(), kLegacyMagic.data(), kLegacyMagic.size()) == 0) {
    fail(ErrorCode::unsupported, "a torch.save stream from before torch 1.6");
  }
  if (std::memcmp(start.data() + kTarMagicOffset, "ustar", 5) == 0) {
    fail(ErrorCode::unsupported, "a tar archive, as torch.save wrote before 0.1.10");
  }
  if (size >= 4 && std::memcmp(start.data(), "PK", 2) != 0)
    fail(ErrorCode::corrupt, "not a torch.save file");
}

zip::Archive open_archive(std::shared_ptr<const ByteSource> source) {
  try {
    return zip::Archive(source);
  } catch (const Error&) {
    explain_other_format(*source);
    throw;
  }
}

class Reader {
 public:
  explicit Reader(std::shared_ptr<const ByteSource> source)
      : archive_(open_archive(std::move(source))) {
    find_root();
    check_records();
  }

  Value run() {
    const zip::Entry& entry = *archive_.find(root_ + "data.pkl");
    const std::vector<std::byte> bytes = archive_.read(entry, kPickleCap);
    pickle::ReadOptions options;
    options.persistent_load = [this](const Value& id) { return load_storage(id); };
    options.reduce = [](const Value& callable, const Value& arguments, Value& result) {
      return callable.is(Kind::global) && rebuild(callable, arguments.items(), result);
    };
    try {
      pickle::Parsed parsed = pickle::read(bytes, options);
      if (parsed.consumed != bytes.size()) {
        throw Error(ErrorCode::corrupt, "bytes after the end of the pickle")
            .at_offset(parsed.consumed);
      }
      return std::move(parsed.value);
    } catch (Error& error) {
      throw error.at_path(name() + ":" + entry.name);
    }
  }

 private:
  [[nodiscard]] const std::string& name() const { return archive_.source()->name(); }
  [[noreturn]] void fail(ErrorCode code, std::string what) const {
    throw Error(code, std::move(what)).at_path(name());
  }

  void find_root();
  void check_records() const;
  [[nodiscard]] std::string text(std::string_view record) const;
  Value load_storage(const Value& id);
  std::shared_ptr<const Value> id_strings(const Value& storage, const Value& location);
  static bool rebuild(const Value& callable, const Value::List& arguments, Value& result);

  zip::Archive archive_;
  std::string root_;                                 // with the slash
  std::unordered_map<std::string, Value> storages_;  // by key
  std::shared_ptr<const Value> id_strings_;          // of the latest storage
};

// All records lie in one folder, which the first one names.
void Reader::find_root() {
  if (archive_.entries().empty())
    fail(ErrorCode::corrupt, "a zip archive without entries, expected torch.save's");
  const std::string& first = archive_.entries().front().name;
  const std::size_t slash = first.find('/');
  root_ = slash == std::string::npos ? "" : first.substr(0, slash + 1);
  const bool plain = root_.find('\\') == std::string::npos && root_.find('\0') == std::string::npos;
  if (root_.size() < 2 || root_ == "./" || root_ == "../" || !plain) {
    fail(ErrorCode::corrupt, "zip entry '" + first + "' is not in a folder of torch.save");
  }
  for (const zip::Entry& entry : archive_.entries()) {
    if (!entry.name.starts_with(root_)) {
      fail(ErrorCode::corrupt,
           "zip entry '" + entry.name + "' is outside of the folder '" + root_ + "'");
    }
  }
}

std::string Reader::text(std::string_view record) const {
  const zip::Entry* entry = archive_.find(root_ + std::string(record));
  if (entry == nullptr) return {};
  const std::vector<std::byte> bytes = archive_.read(*entry, kTextCap);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void Reader::check_records() const {
  if (archive_.find(root_ + "data.pkl") == nullptr) {
    fail(ErrorCode::corrupt, "a zip archive without data.pkl: not written by torch.save");
  }
  if (archive_.find(root_ + "constants.pkl") != nullptr)
    fail(ErrorCode::unsupported, "a TorchScript archive");
  std::string version = text("version");
  if (version.empty()) version = text(".data/version");
  while (!version.empty() && version.back() == '\n') version.pop_back();
  std::uint64_t number = 0;
  const auto [end, problem] =
      std::from_chars(version.data(), version.data() + version.size(), number);
  if (version.empty() || problem != std::errc() || end != version.data() + version.size()) {
    fail(ErrorCode::corrupt, "the archive's version is '" + version + "', expected a number");
  }
  if (number == 0 || number > kNewestVersion) {
    fail(ErrorCode::unsupported, "archive version " + version + ", versions 1 to 10 are read");
  }
  const std::string order = text("byteorder");
  if (order == "big") fail(ErrorCode::unsupported, "a big-endian archive");
  if (!order.empty() && order != "little")
    fail(ErrorCode::corrupt, "the archive's byteorder is '" + order + "'");
}

// ("storage", class, key, location, number of elements) names record data/<key>.
Value Reader::load_storage(const Value& id) {
  if (!id.is(Kind::tuple) || id.size() != 5) corrupt("a persistent id that is not a tuple of 5");
  const Value::List& parts = id.items();
  const bool typed = parts[0].is(Kind::string) && parts[0].as_string() == "storage" &&
                     parts[1].is(Kind::global) && parts[2].is(Kind::string) &&
                     parts[3].is(Kind::string) && parts[4].is(Kind::integer);
  if (!typed) corrupt("a persistent id that does not describe a storage");
  const std::string& module = parts[1].global_module();
  if (module != "torch" && module != "torch.storage")
    corrupt("a storage class of module " + module);
  StorageClass found = storage_class(parts[1].global_name());
  const std::int64_t count = parts[4].as_int();
  const std::string& key = parts[2].as_string();

  Value& known = storages_[key];
  if (!known.is(Kind::none)) {
    const Tensor& leaf = known.as_tensor();
    const Storage& storage = *leaf.pieces[0].storage;
    if (storage.dtype != found.dtype || storage.torch_class != found.kept_name ||
        leaf.shape[0] != count || storage.location != parts[3].as_string()) {
      corrupt("storage '" + key + "' is described in two ways");
    }
    return known;
  }
  const zip::Entry* entry = archive_.find(root_ + "data/" + key);
  if (entry == nullptr) corrupt("storage '" + key + "' has no record");
  if (count < 0 || static_cast<std::uint64_t>(count) != entry->size / size_of(found.dtype)) {
    corrupt("storage '" + key + "' of " + std::to_string(count) + " elements of " +
            std::to_string(size_of(found.dtype)) + " bytes has a record of " +
            std::to_string(entry->size) + " bytes");
  }
  auto storage = std::make_shared<Storage>();
  storage->source = archive_.source();
  storage->offset = entry->data_offset;
  storage->size = entry->size;
  storage->crc32 = entry->crc32;
  storage->location = parts[3].as_string();
  storage->dtype = found.dtype;
  storage->torch_class = std::move(found.kept_name);
  storage->id_strings = id_strings(parts[0], parts[3]);
  Tensor leaf;
  leaf.dtype = storage->dtype;
  leaf.shape = {count};
  leaf.bare_storage = true;
  leaf.pieces = {{.slice = whole(leaf.shape), .storage = std::move(storage), .strides = {}}};
  known = Value(std::move(leaf));
  return known;
}

// One tuple for all storages that share the strings. A location with a number is made anew in
// Python each time, and is nobody else's.
std::shared_ptr<const Value> Reader::id_strings(const Value& storage, const Value& location) {
  if (location.as_string().find(':') != std::string::npos) return nullptr;
  const bool same = id_strings_ && id_strings_->items()[0].identity() == storage.identity() &&
                    id_strings_->items()[1].identity() == location.identity();
  if (!same) id_strings_ = std::make_shared<const Value>(Value::tuple({storage, location}));
  return id_strings_;
}

Shape shape_of(const Value& value) {
  if (!value.is(Kind::tuple)) corrupt("a tensor's size or stride is not a tuple");
  Shape shape;
  shape.reserve(value.size());
  for (const Value& item : value.items()) {
    if (!item.is(Kind::integer)) corrupt("a tensor's size or stride is not made of integers");
    shape.push_back(item.as_int());
  }
  return shape;
}

bool is_empty_ordered_dict(const Value& value) {
  return value.is(Kind::dict) && value.dict_kind() == DictKind::ordered_dict && value.size() == 0;
}

// Sets conj and neg from the last argument; false when it says more than those.
bool take_bits(const Value& metadata, Tensor& tensor) {
  if (!metadata.is(Kind::dict)) return false;
  for (const auto& [key, value] : metadata.pairs()) {
    if (!key.is(Kind::string) || !value.is(Kind::boolean)) return false;
    if (key.as_string() == "conj") {
      tensor.conj = value.as_bool();
    } else if (key.as_string() == "neg") {
      tensor.neg = value.as_bool();
    } else {
      return false;
    }
  }
  return true;
}

// _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata]); v3 has the
// dtype before the metadata. False: a variant that stays an object node.
bool rebuild_tensor(const Value::List& arguments, bool v3, Tensor& tensor) {
  const std::size_t fixed = v3 ? 7 : 6;
  if (arguments.size() != fixed && arguments.size() != fixed + 1)
    corrupt("a tensor with arguments missing");
  if (!arguments[0].is(Kind::tensor) || !arguments[0].as_tensor().bare_storage)
    corrupt("a tensor without a storage");
  if (!arguments[1].is(Kind::integer) || !arguments[4].is(Kind::boolean))
    corrupt("a tensor with arguments of wrong types");
  const std::shared_ptr<Storage>& storage = arguments[0].as_tensor().pieces[0].storage;
  if ((storage->torch_class == kUntyped) != v3 || (!v3 && !storage->torch_class.empty()))
    return false;
  if (!is_empty_ordered_dict(arguments[5])) return false;
  if (arguments.size() > fixed && !take_bits(arguments[fixed], tensor)) return false;
  tensor.dtype = storage->dtype;
  if (v3) {
    if (!arguments[6].is(Kind::global) || arguments[6].global_module() != "torch")
      corrupt("a tensor without a dtype");
    tensor.dtype = dtype_from_torch(arguments[6].global_name());
    if (class_name(tensor.dtype) != kUntyped) return false;
  }
  tensor.shape = shape_of(arguments[2]);
  Shape strides = shape_of(arguments[3]);
  const std::int64_t offset = arguments[1].as_int();
  require_inside({offset, tensor.shape, strides}, tensor.dtype, storage->size);
  if (strides == torch_strides(tensor.shape)) strides.clear();
  tensor.requires_grad = arguments[4].as_bool();
  tensor.pieces = {{.slice = whole(tensor.shape),
                    .storage = storage,
                    .storage_offset = offset,
                    .strides = std::move(strides)}};
  return true;
}

// _rebuild_parameter(tensor, requires_grad, hooks[, state])
bool rebuild_parameter(const Value::List& arguments, bool with_state, Tensor& tensor) {
  if (arguments.size() != (with_state ? 4U : 3U)) corrupt("a parameter with arguments missing");
  if (!arguments[0].is(Kind::tensor) || arguments[0].as_tensor().bare_storage ||
      !arguments[1].is(Kind::boolean))
    return false;
  tensor = arguments[0].as_tensor();
  if (tensor.parameter || tensor.attributes || tensor.requires_grad ||
      !is_empty_ordered_dict(arguments[2]))
    return false;
  tensor.parameter = true;
  tensor.requires_grad = arguments[1].as_bool();
  if (with_state) tensor.attributes = std::make_shared<const Value>(arguments[3]);
  return true;
}

// 2 or 3 for the two rebuilders of plain tensors, else 0.
int rebuilder_version(const Value& callable) {
  if (is_global(callable, "torch._utils", "_rebuild_tensor_v2")) return 2;
  return is_global(callable, "torch._utils", "_rebuild_tensor_v3") ? 3 : 0;
}

bool Reader::rebuild(const Value& callable, const Value::List& arguments, Value& result) {
  Tensor tensor;
  bool made = false;
  if (const int version = rebuilder_version(callable)) {
    made = rebuild_tensor(arguments, version == 3, tensor);
  } else if (is_global(callable, "torch._utils", "_rebuild_parameter")) {
    made = rebuild_parameter(arguments, false, tensor);
  } else if (is_global(callable, "torch._utils", "_rebuild_parameter_with_state")) {
    made = rebuild_parameter(arguments, true, tensor);
  } else if (is_global(callable, "torch._tensor", "_rebuild_from_type_v2") &&
             arguments.size() == 4 && rebuilder_version(arguments[0]) != 0 &&
             is_global(arguments[1], "torch", "Tensor") && arguments[2].is(Kind::tuple)) {
    made = rebuild_tensor(arguments[2].items(), rebuilder_version(arguments[0]) == 3, tensor);
    tensor.attributes = std::make_shared<const Value>(arguments[3]);
  }
  if (made) result = Value(std::move(tensor));
  return made;
}

}  // namespace

Value read(std::shared_ptr<const ByteSource> source) {
  return Reader(std::move(source)).run();
}

Tensor read_tensor_item(std::shared_ptr<const ByteSource> item) {
  const std::string name = item->name();
  Value value = read(std::move(item));
  if (!value.is(Kind::tensor) || value.as_tensor().bare_storage) {
    throw Error(ErrorCode::mismatch, "an item that is not one tensor").at_path(name);
  }
  return std::move(value.as_tensor());
}

}  // namespace tessera::torch_file
