#include "tessera/scan.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <span>

#include "base/one_of.h"
#include "base/stop.h"
#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/zstd_source.h"
#include "checkpoint/tree/tree_json.h"
#include "format/pickle/names.h"
#include "format/pickle/pickle.h"
#include "format/safetensors/safetensors.h"
#include "format/torch/names.h"
#include "format/zip/zip.h"
#include "io/head.h"
#include "storage/stopping_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kPickleLimit = std::uint64_t{4} << 30;  // bytes of one pickle
constexpr int kStreamPickles = 5;  // of torch's stream before 1.6; raw storages follow

// What has a meaning for our readers, dtypes and storage classes of torch apart.
constexpr auto kKnown = std::to_array<std::string_view>({
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.bytes",
    "builtins.complex",
    "builtins.frozenset",
    "builtins.set",
    "collections.OrderedDict",
    "collections.defaultdict",
    "torch.Size",
    "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT",
    "torch.serialization._get_layout",
});

// A length and a brace. A zip has its first method in the brace's place, and none has that number.
bool is_safetensors(const ByteSource& source, std::uint64_t at) {
  std::byte brace{};
  if (source.size() <= 8 || at > source.size() - 9) return false;
  source.read_at(at + 8, {&brace, 1});
  return brace == std::byte{'{'};
}

template <typename Call>
bool succeeds(Call call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    return false;
  }
}

// A dtype or a storage class.
bool is_torch_type(const std::string& module, const std::string& name) {
  return is_one_of(module, "torch", "torch.storage") &&
         (succeeds([&name] { (void)torch_file::storage_class(name); }) ||
          succeeds([&name] { (void)dtype_from_torch(name); }));
}

NameKind kind_of(const pickle::Mention& mention) {
  const auto& [module, name] = mention;
  if (pickle::is_dangerous(module, name)) return NameKind::dangerous;
  const bool listed = std::ranges::find(kKnown, module + "." + name) != kKnown.end();
  return listed || is_torch_type(module, name) ? NameKind::known : NameKind::opaque;
}

class Scan {
 public:
  Scan(std::shared_ptr<Store> store, std::stop_token stop)
      : store_(stopping_store(std::move(store), stop)), stop_(std::move(stop)) {}

  // Any file, by its content; with `must` one that is no pickle is a problem.
  void file(const std::string& name, bool must) {
    guarded(name, [&] {
      const auto source = store_->open(name);
      if (is_safetensors(*source, 0)) return tree_entry(*source, name);
      const auto head = head_of<2>(*source);
      if (head[0] == 'P' && head[1] == 'K') {
        archive(source, name);
      } else if (must || head[0] == 0x80) {
        stream(read_all(*source, kPickleLimit), name);
      }
    });
  }

  // Every item that a `.metadata` of a DCP directory names.
  void items(const std::string& name) {
    guarded(name, [&] {
      const dcp::Metadata metadata = dcp::decode(read_all(*store_->open(name), kMetadataLimit));
      for (const dcp::Entry& entry : metadata.entries) {
        if (!entry.is_tensor) item(entry.item, entry.name);
        for (const dcp::Chunk& chunk : entry.chunks) item(chunk.item, entry.name);
      }
    });
  }

  [[nodiscard]] ScanReport report() && {
    for (auto& [name, found] : names_) report_.names.push_back(std::move(found));
    std::stable_sort(report_.names.begin(), report_.names.end(),
                     [](const ScannedName& a, const ScannedName& b) { return a.kind > b.kind; });
    return std::move(report_);
  }

 private:
  template <typename Call>
  void guarded(const std::string& where, Call call) {
    try {
      call();
    } catch (Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      error.at_path(store_->name() + "/" + where);
      report_.problems.emplace_back(error.what());
    }
  }

  void item(const dcp::Item& item, const std::string& key) {
    guarded(item.path, [&] {
      require_going_on(stop_);
      auto& source = sources_[item.path];
      if (!source) source = store_->open(item.path);
      // A data file in the safetensors format: the length is one of raw elements.
      if (item.transforms.empty() && is_safetensors(*source, item.offset)) return;
      std::shared_ptr<const ByteSource> bytes = slice_source(source, item.offset, item.length);
      if (encoding_of(view_of(item)) == Encoding::torch_item_zstd)
        bytes = zstd_source(std::move(bytes), kPickleLimit);
      archive(bytes, item.path + ":" + key);
    });
  }

  // JSON and raw tensors, and in our own entry of the JSON archives of torch.save.
  void tree_entry(const ByteSource& source, const std::string& where) {
    const safetensors::Header header = safetensors::read_header(source);
    for_each_archive(header.metadata, [&](std::vector<std::byte> bytes) {
      archive(memory_source(std::move(bytes), where), where + ":" + kTreeKey);
    });
  }

  void archive(const std::shared_ptr<const ByteSource>& source, const std::string& where) {
    const zip::Archive archive(source);
    for (const zip::Entry& entry : archive.entries()) {
      if (entry.name.ends_with(".pkl"))
        pickle(archive.read(entry, kPickleLimit), where + ":" + entry.name);
    }
  }

  // One pickle, or torch's stream of several.
  void stream(ByteView bytes, const std::string& where) {
    for (int i = 0; i < kStreamPickles; ++i) {
      bytes = bytes.subspan(pickle(bytes, where));
      if (bytes.empty() || bytes[0] != std::byte{0x80}) return;
    }
  }

  std::size_t pickle(ByteView bytes, const std::string& where) {
    ++report_.pickles;
    pickle::Mentions found;
    const auto add = [&] {
      for (const pickle::Mention& mention : found.names) {
        const std::string full = mention.module + "." + mention.name;
        ScannedName& row = names_[full];
        if (row.pickles++ == 0) row = {full, kind_of(mention), 1, where};
      }
    };
    try {
      pickle::find_mentions(bytes, found);
    } catch (...) {
      add();
      throw;
    }
    add();
    return found.consumed;
  }

  std::shared_ptr<Store> store_;
  std::stop_token stop_;
  std::map<std::string, std::shared_ptr<const ByteSource>> sources_;  // data files, by name
  std::map<std::string, ScannedName> names_;
  ScanReport report_;
};

bool has_pickle_suffix(const std::string& name) {
  constexpr std::array<std::string_view, 8> kSuffixes = {".pt",  ".pth",    ".bin",      ".ckpt",
                                                         ".pkl", ".pickle", ".metadata", ".th"};
  return std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&name](std::string_view suffix) { return name.ends_with(suffix); });
}

// JSON has no pickles, and those in data files are what `.metadata` names.
bool may_be_pickle(const std::string& name) {
  return !name.ends_with(".distcp") && !name.ends_with(".json");
}

ScanReport scan_object(std::shared_ptr<Store> store, const std::string& name,
                       const std::stop_token& stop) {
  Scan scan(std::move(store), stop);
  scan.file(name, true);
  return std::move(scan).report();
}

ScanReport scan_directory(const std::shared_ptr<Store>& store, const std::stop_token& stop) {
  Scan scan(store, stop);
  // As its readers do: where there is no `.metadata`, the ranks' own count.
  const bool merged = !store->exists(kDcpMetadata);
  for (const ObjectInfo& object : store->list()) {
    if (may_be_pickle(object.name)) scan.file(object.name, has_pickle_suffix(object.name));
    if (merged && is_rank_metadata(object.name)) scan.items(object.name);
  }
  if (!merged) scan.items(std::string(kDcpMetadata));
  return std::move(scan).report();
}

}  // namespace

std::string_view to_string(NameKind kind) noexcept {
  constexpr std::array<std::string_view, 3> kNames{"known", "opaque", "dangerous"};
  return kNames[static_cast<std::size_t>(kind)];
}

ScanReport scan(const std::string& path, const std::stop_token& stop) {
  namespace fs = std::filesystem;
  const Location where = located_source(path);
  if (where.store) {
    return where.name.empty() ? scan_directory(where.store, stop)
                              : scan_object(where.store, where.name, stop);
  }
  const fs::path file = where.path;
  std::error_code error;
  if (!fs::exists(file, error))
    throw Error(ErrorCode::not_found, "there is no such file or directory").at_path(path);
  if (fs::is_directory(file, error)) return scan_directory(posix_store(file.string()), stop);
  return scan_object(posix_store(file.parent_path().string()), file.filename().string(), stop);
}

}  // namespace tessera
