#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/numbers.h"
#include "base/text.h"
#include "format/pickle/pickle.h"
#include "format/torch/rebuild.h"
#include "format/torch/records.h"
#include "format/torch/script.h"
#include "format/torch/stream.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"
#include "tessera/error.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

constexpr std::uint64_t kTarMagicOffset = 257;
constexpr std::uint64_t kCodeCap = 16U << 20U;  // bytes of a file of TorchScript's code

// The shard lists of F-04: what a ShardedTensor says of all ranks.
constexpr std::array<pickle::SkipRule::Attribute, 3> kShardLists = {{
    {"torch.distributed._shard.sharded_tensor.metadata ShardedTensorMetadata", "shards_metadata"},
    {"torch.distributed._shard.sharding_spec.chunk_sharding_spec ChunkShardingSpec", "placements"},
    {"torch.distributed._shard.sharding_spec.api EnumerableShardingSpec", "shards"},
}};
constexpr std::array<std::string_view, 3> kShardClasses = {
    "torch.distributed._shard.metadata ShardMetadata",
    "torch.distributed.remote_device _remote_device",
    "torch device",
};

constexpr std::uint64_t kDirectoryReach = 1 << 20;  // bytes at the end in which they are looked for

// Says what a file is that is not a readable zip archive; returns when it has nothing better to
// say.
void explain_other_format(const ByteSource& source) {
  std::array<std::byte, kTarMagicOffset + 5> start{};
  const std::size_t size = std::min<std::uint64_t>(source.size(), start.size());
  source.read_at(0, MutableByteView(start).first(size));
  const auto fail = [&](ErrorCode code, const char* what) {
    throw Error(code, what).at_path(source.name());
  };
  if (std::memcmp(start.data() + kTarMagicOffset, "ustar", 5) == 0) {
    fail(ErrorCode::unsupported, "a tar archive, as torch.save wrote before 0.1.10");
  }
  if (is_text_stream(source))
    fail(ErrorCode::unsupported, "a stream of torch.save by pickle protocol 0 or 1");
  if (size >= 4 && std::memcmp(start.data(), "PK", 2) != 0)
    fail(ErrorCode::corrupt, "not a torch.save file");
}

// Says what an archive is whose entries are compressed, as TorchScript's are: by its directory.
void explain_other_archive(const ByteSource& source) {
  std::string end(std::min(source.size(), kDirectoryReach), '\0');
  source.read_at(source.size() - end.size(), std::as_writable_bytes(std::span(end)));
  const ArchiveKind kind = kind_by_names(end);
  if (kind != ArchiveKind::torch_save)
    throw Error(ErrorCode::unsupported, std::string(describe(kind))).at_path(source.name());
}

// None: the file begins as a stream does.
std::optional<zip::Archive> open_archive(const std::shared_ptr<const ByteSource>& source) {
  try {
    return zip::Archive(source);
  } catch (const Error& error) {
    if (is_stream(*source)) return std::nullopt;
    explain_other_format(*source);
    if (error.code() == ErrorCode::unsupported) explain_other_archive(*source);
    throw;
  }
}

Tensor tensor_of_item(Value value, const std::string& name) {
  if (!value.is(Kind::tensor) || value.as_tensor().bare_storage)
    throw Error(ErrorCode::mismatch, "an item that is not one tensor").at_path(name);
  return std::move(value.as_tensor());
}

// The pickle of the item that a thread read last, and the tensor that it makes. A pickle says what
// the tensor is, the archive's directory says where its storage is: the many items that have the
// same dtype and shape have the same pickle.
struct LastItem {
  std::vector<std::byte> pickle;  // empty: none
  std::string key;                // of the storage
  Tensor tensor;                  // one piece, whose storage has no source
};
constexpr std::size_t kItemPickle = 4096;  // bytes; a longer pickle is not kept

LastItem& last_item() {
  thread_local LastItem last;
  return last;
}

// A pickle of an archive, and the folder that its storages are in.
struct Pickled {
  std::string_view record, storages;
};
constexpr Pickled kData{"data.pkl", "data/"};
constexpr Pickled kConstants{"constants.pkl", "constants/"};

class Reader {
 public:
  Reader(zip::Archive archive, const ReadOptions& wanted, const Pickled& pickled = kData,
         ArchiveKind kind = ArchiveKind::torch_save)
      : records_(std::move(archive)), wanted_(wanted), pickled_(pickled) {
    require_kind(kind);
    records_.require_readable();
  }

  Value run() { return unpickle(read_pickle()); }
  Tensor run_item();

 private:
  [[nodiscard]] const zip::Entry& pickle_entry() const { return *records_.find(pickled_.record); }
  [[nodiscard]] std::vector<std::byte> read_pickle() const {
    return records_.archive().read(pickle_entry(), kPickleCap);
  }

  Value unpickle(const std::vector<std::byte>& bytes) {
    try {
      pickle::Parsed parsed = pickle::read(bytes, options());
      if (parsed.consumed != bytes.size()) {
        throw Error(ErrorCode::corrupt, "bytes after the end of the pickle")
            .at_offset(parsed.consumed);
      }
      return std::move(parsed.value);
    } catch (Error& error) {
      throw error.at_path(records_.name() + ":" + pickle_entry().name);
    }
  }

  pickle::ReadOptions options();
  void require_kind(ArchiveKind kind) const;
  Value load_storage(const Value& id);
  void keep(LastItem& last, std::vector<std::byte> pickle, const Tensor& tensor) const;
  [[nodiscard]] std::optional<Tensor> again(const LastItem& last) const;
  [[nodiscard]] const zip::Entry& record_of(const StorageId& id) const;

  Records records_;
  ReadOptions wanted_;
  const Pickled pickled_;
  std::unordered_map<std::string, Value> storages_;  // by key
  IdStrings id_strings_;
};

// Whether a leaf stands for what a later id of this class means. Views of two types may share a
// storage that holds nothing: torch compares types of addresses.
bool stands_for(const Value& leaf, const StorageClass& kept) {
  if (leaf.is(Kind::none)) return false;
  const Storage& storage = *leaf.as_tensor().pieces[0].storage;
  return storage.size > 0 || is_of_class(storage, kept);
}

pickle::ReadOptions Reader::options() {
  pickle::ReadOptions options;
  options.keeps_compiler = wanted_.keeps_compiler;
  if (wanted_.skip_shard_lists) options.skip = pickle::SkipRule{kShardLists, kShardClasses};
  options.persistent_load = [this](const Value& id) { return load_storage(id); };
  options.reduce = [this](const Value& callable, const Value& arguments, Value& result) {
    return rebuild_tensor(callable, arguments, result) ||
           restore_typed(callable, arguments, result) ||
           (wanted_.rebuild && wanted_.rebuild(callable, arguments, result));
  };
  return options;
}

void Reader::require_kind(ArchiveKind kind) const {
  if (records_.kind() != kind)
    throw Error(ErrorCode::unsupported, std::string(describe(records_.kind())))
        .at_path(records_.name());
  if (records_.find(pickled_.record) == nullptr) {
    throw Error(ErrorCode::corrupt, "a zip archive without " + std::string(pickled_.record) +
                                        ": not written by torch.save")
        .at_path(records_.name());
  }
}

const zip::Entry& Reader::record_of(const StorageId& id) const {
  const zip::Entry* entry = records_.find(std::string(pickled_.storages) + id.key);
  if (entry == nullptr) corrupt("storage '" + id.key + "' has no record");
  if (entry->deflated) throw Error(ErrorCode::unsupported, "storage '" + id.key + "' is deflated");
  const std::size_t element = size_of(id.kept.dtype);
  if (id.count < 0 || static_cast<std::uint64_t>(id.count) != entry->size / element) {
    corrupt("storage '" + id.key + "' of " + std::to_string(id.count) + " elements of " +
            std::to_string(element) + " bytes has a record of " + std::to_string(entry->size) +
            " bytes");
  }
  return *entry;
}

// ("storage", class, key, location, number of elements) names record data/<key>.
Value Reader::load_storage(const Value& id) {
  StorageId parsed = parse_storage_id(id, 5);
  Value& known = storages_[parsed.key];
  if (stands_for(known, parsed.kept)) {
    require_same_storage(known, parsed);
    return known;
  }
  const zip::Entry& entry = record_of(parsed);
  Storage storage;
  storage.source = records_.archive().source();
  storage.offset = entry.data_offset;
  storage.size = entry.size;
  storage.crc32 = entry.crc32;
  storage.id_strings = id_strings_.of(id);
  known = bare_storage(std::move(parsed), std::move(storage));
  return known;
}

// Keeps what only depends on the pickle, where that is all but the place of one storage.
void Reader::keep(LastItem& last, std::vector<std::byte> pickle, const Tensor& tensor) const {
  if (pickle.size() > kItemPickle || storages_.size() != 1 || tensor.attributes) return;
  last = {{}, storages_.begin()->first, tensor};
  Storage storage = *tensor.pieces.at(0).storage;
  storage.source = nullptr;
  storage.id_strings = nullptr;
  last.tensor.pieces[0].storage = std::make_shared<Storage>(std::move(storage));
  last.pickle = std::move(pickle);
}

// The tensor of the same pickle over this archive's record; none where that has another size.
std::optional<Tensor> Reader::again(const LastItem& last) const {
  const zip::Entry* entry = records_.find("data/" + last.key);
  Storage storage = *last.tensor.pieces[0].storage;
  if (entry == nullptr || entry->size != storage.size) return std::nullopt;
  storage.source = records_.archive().source();
  storage.offset = entry->data_offset;
  storage.crc32 = entry->crc32;
  Tensor tensor = last.tensor;
  tensor.pieces[0].storage = std::make_shared<Storage>(std::move(storage));
  return tensor;
}

Tensor Reader::run_item() {
  std::vector<std::byte> pickle = read_pickle();
  LastItem& last = last_item();
  if (!pickle.empty() && pickle == last.pickle) {
    if (std::optional<Tensor> tensor = again(last)) return *std::move(tensor);
  }
  Tensor tensor = tensor_of_item(unpickle(pickle), records_.name());
  keep(last, std::move(pickle), tensor);
  return tensor;
}

}  // namespace

bool is_raw(std::string_view record) {
  const std::size_t slash = record.find('/');
  if (slash == std::string_view::npos) return false;
  record.remove_prefix(slash + 1);
  return record.starts_with("data/") ||
         is_one_of(record, "version", "byteorder", ".format_version", ".storage_alignment",
                   ".data/version", ".data/serialization_id");
}

Value read(std::shared_ptr<const ByteSource> source, const ReadOptions& options) {
  std::optional<zip::Archive> archive = open_archive(source);
  if (!archive) return read_stream(std::move(source), options.keeps_compiler);
  return Reader(std::move(*archive), options).run();
}

std::optional<Script> read_script(const std::shared_ptr<const ByteSource>& source) {
  const auto archive = archive_of(source, {ArchiveKind::script});
  if (!archive) return std::nullopt;
  const Records records(*archive);
  if (records.find(kData.record) == nullptr) return std::nullopt;  // as those for phones are
  const Value data = Reader(*archive, {}, kData, ArchiveKind::script).run();
  const Value constants = Reader(*archive, {}, kConstants, ArchiveKind::script).run();
  const auto code_of = [&](const std::string& module) -> std::string {
    const zip::Entry* code = records.find("code/" + module + ".py");
    if (code == nullptr) return {};
    const std::vector<std::byte> bytes = archive->read(*code, kCodeCap);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  };
  try {
    return script_of(data, constants, code_of);
  } catch (Error& error) {
    throw error.at_path(records.name());
  }
}

Tensor read_tensor_item(std::shared_ptr<const ByteSource> item) {
  std::optional<zip::Archive> archive = open_archive(item);
  if (archive) return Reader(std::move(*archive), {}).run_item();
  const std::string name = item->name();
  return tensor_of_item(read_stream(std::move(item)), name);
}

}  // namespace tessera::torch_file
