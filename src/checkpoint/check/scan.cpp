#include "tessera/scan.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <span>

#include "base/endian.h"
#include "base/one_of.h"
#include "base/stop.h"
#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/zstd_source.h"
#include "checkpoint/tree/tree_json.h"
#include "format/pickle/scan.h"
#include "format/safetensors/safetensors.h"
#include "format/torch/names.h"
#include "format/torch/stream.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"
#include "io/head.h"
#include "storage/stopping_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kPickleLimit = std::uint64_t{4} << 30;  // bytes of one pickle
constexpr std::uint64_t kFirstWindow = 16 << 10;  // bytes read in the hope of a whole one
constexpr int kStreamPickles = 5;  // of torch's stream before 1.6; raw storages follow
constexpr int kMaxNesting = 8;     // of pickles and archives in each other
constexpr std::size_t kMaxProblems = 1000;

using Source = std::shared_ptr<const ByteSource>;

// What bytes are said to be.
enum class Said : std::uint8_t {
  elements,  // of a tensor: nothing else counts than what does something when it is unpickled
  nothing,   // a pickle only if it looks like one
  pickle,    // anything else is a problem
};

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

// What a file is, by its first bytes.
using Head = std::array<unsigned char, 512>;

struct Magic {
  std::size_t at;
  std::string_view bytes;
  const char* what;
};

// What Python's readers of pickles look into and this one does not.
constexpr auto kForeign = std::to_array<Magic>({
    {0, "7z\xbc\xaf\x27\x1c", "a 7z archive"},
    {0, "Rar!", "a RAR archive"},
    {0, "\x1f\x8b", "a file compressed by gzip"},
    {0, "BZh", "a file compressed by bzip2"},
    {0,
     std::string_view("\xfd"
                      "7zXZ\0",
                      6),
     "a file compressed by xz"},
    {0, "\x28\xb5\x2f\xfd", "a file compressed by zstd"},
    {0, "\x04\x22\x4d\x18", "a file compressed by lz4"},
});

bool begins(const Head& head, std::size_t at, std::string_view bytes) {
  return std::memcmp(head.data() + at, bytes.data(), bytes.size()) == 0;
}

const Magic* foreign_kind(const Head& head) {
  const auto* found = std::ranges::find_if(
      kForeign, [&head](const Magic& magic) { return begins(head, magic.at, magic.bytes); });
  return found == kForeign.end() ? nullptr : found;
}

// A first header of a tar archive, of any age: its checksum, in octal digits at 148, is right.
// Python's reader asks for nothing else.
bool is_tar(const Head& head) {
  constexpr std::size_t kSum = 148;
  constexpr std::size_t kDigits = 8;
  long said = 0;
  bool any = false;
  for (std::size_t i = kSum; i < kSum + kDigits; ++i) {
    if (head[i] == 0 || head[i] == ' ') continue;
    if (head[i] < '0' || head[i] > '7') return false;
    said = said * 8 + (head[i] - '0');
    any = true;
  }
  long sum = 0;
  long with_signs = 0;
  for (std::size_t i = 0; i < head.size(); ++i) {
    const bool own = i >= kSum && i < kSum + kDigits;
    sum += own ? ' ' : head[i];
    with_signs += own ? ' ' : static_cast<signed char>(head[i]);
  }
  return any && is_one_of(said, sum, with_signs);
}

// Where the pickle of numpy's array of objects begins; 0: there is none. Throws `corrupt` for a
// header that numpy would not read either.
std::uint64_t pickle_in_npy(const ByteSource& source, const Head& head) {
  const bool wide = head[6] >= 2;
  const std::uint64_t size =
      wide ? load_le<std::uint32_t>(std::as_bytes(std::span(head)).data() + 8)
           : load_le<std::uint16_t>(std::as_bytes(std::span(head)).data() + 8);
  const std::uint64_t begin = wide ? 12 : 10;
  if (size > source.size() - std::min(begin, source.size()) || size > (1U << 20))
    throw Error(ErrorCode::corrupt, "the header of a .npy file leaves it");
  std::string header(size, '\0');
  source.read_at(begin, std::as_writable_bytes(std::span(header)));
  return header.find('O') == std::string::npos ? 0 : begin + size;
}

std::vector<std::byte> bytes_of(const ByteSource& source, std::uint64_t at, std::uint64_t size) {
  std::vector<std::byte> bytes(size);
  source.read_at(at, bytes);
  return bytes;
}

Said said_by(std::string_view name) {
  constexpr std::array<std::string_view, 11> kSuffixes = {
      ".pt",       ".pth", ".bin",    ".ckpt", ".pkl", ".pickle",
      ".metadata", ".th",  ".joblib", ".dill", ".pt2"};
  const bool pickle = std::ranges::any_of(
      kSuffixes, [name](std::string_view suffix) { return name.ends_with(suffix); });
  return pickle ? Said::pickle : Said::nothing;
}

NameKind kind_of(pickle::Verdict verdict) {
  constexpr std::array<NameKind, 3> kKinds{NameKind::vetted, NameKind::unknown,
                                           NameKind::dangerous};
  return kKinds[static_cast<std::size_t>(verdict)];
}

// The names, over all pickles.
class Names {
 public:
  explicit Names(const std::vector<std::string>& allow) : allow_(allow) {}

  void add(const pickle::Finding& found, const std::string& where) {
    NameKind kind = kind_of(found.verdict);
    if (kind == NameKind::unknown && is_allowed(found.name)) kind = NameKind::allowed;
    ScannedName& row = rows_[found.name];
    const std::uint64_t pickles = row.pickles + 1;
    if (pickles == 1 || kind > row.kind) row = {found.name, kind, 0, where, found.how};
    row.pickles = pickles;
  }

  [[nodiscard]] std::vector<ScannedName> sorted() && {
    std::vector<ScannedName> names;
    for (auto& [name, row] : rows_) names.push_back(std::move(row));
    std::ranges::stable_sort(names, std::greater<>(), &ScannedName::kind);
    return names;
  }

 private:
  [[nodiscard]] bool is_allowed(const std::string& name) const {
    return std::ranges::any_of(allow_, [&name](const std::string& glob) {
      return glob == name || ::fnmatch(glob.c_str(), name.c_str(), 0) == 0;
    });
  }

  const std::vector<std::string>& allow_;
  std::map<std::string, ScannedName> rows_;
};

class Scan {
 public:
  Scan(std::shared_ptr<Store> store, const ScanOptions& options)
      : store_(stopping_store(std::move(store), options.stop)),
        stop_(options.stop),
        names_(options.allow) {}

  // Any file, by its content.
  void file(const std::string& name, Said said) {
    guarded(name, [&] { any(store_->open(name), name, said, 0); });
  }

  // Every item that a `.metadata` of a DCP directory names.
  void items(const std::string& name) {
    guarded(name, [&] {
      const dcp::Metadata metadata = dcp::decode(read_all(*store_->open(name), kMetadataLimit));
      for (const dcp::Entry& entry : metadata.entries) {
        if (!entry.is_tensor) item(entry.item, entry.name, Said::pickle);
        for (std::size_t i = 0; i < entry.chunks.size(); ++i)
          item(entry.chunks[i].item, entry.name,
               is_raw_chunk(entry, i) ? Said::elements : Said::pickle);
      }
    });
  }

  [[nodiscard]] ScanReport report() && {
    report_.names = std::move(names_).sorted();
    return std::move(report_);
  }

 private:
  template <typename Call>
  void guarded(const std::string& where, Call call) {
    try {
      require_going_on(stop_);
      call();
    } catch (Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      problem(error, where);
    }
  }

  void problem(Error error, const std::string& where) {
    if (report_.problems.size() >= kMaxProblems) return;
    report_.problems.emplace_back(error.at_path(store_->name() + "/" + where).what());
  }

  void item(const dcp::Item& item, const std::string& key, Said said) {
    guarded(item.path, [&] {
      auto& source = sources_[item.path];
      if (!source) source = store_->open(item.path);
      Source bytes = slice_source(source, item.offset, item.length);
      if (encoding_of(view_of(item)) == Encoding::torch_item_zstd)
        bytes = zstd_source(std::move(bytes), kPickleLimit);
      any(bytes, item.path + ":" + key, said, 0);
    });
  }

  // Anything, by its first bytes. More than one reader may take them: each is followed.
  void any(const Source& source, const std::string& where, Said said, int depth) {
    if (depth > kMaxNesting) throw Error(ErrorCode::limit, "pickles in pickles in pickles");
    const Head head = head_of<512>(*source);
    if (said == Said::elements) return elements(source, where, head, depth);
    if (begins(head, 0, "PK")) return archive(source, where, depth);
    if (is_tar(head)) throw Error(ErrorCode::unsupported, "a tar archive is not looked into");
    if (const Magic* foreign = foreign_kind(head))
      throw Error(ErrorCode::unsupported, std::string(foreign->what) + " is not looked into");
    if (begins(head, 0, "\x93NUMPY")) {
      const std::uint64_t at = pickle_in_npy(*source, head);
      if (at != 0)
        pickles(slice_source(source, at, source->size() - at), where, Said::pickle, depth);
      return;
    }
    const bool like_safetensors = head[8] == '{' && source->size() > 8;  // a length and a brace
    std::optional<Error> refusal;
    if (like_safetensors) refusal = refusal_of_safetensors(*source, where, depth);
    const bool pickle = pickles(source, where, like_safetensors ? Said::nothing : said, depth);
    if (refusal && !pickle) problem(*refusal, where);
  }

  // What a reader that knows only torch.save would take for one.
  void elements(const Source& source, const std::string& where, const Head& head, int depth) {
    if (begins(head, 0, "PK") && succeeds([&source] { (void)zip::Archive(source); }))
      return archive(source, where, depth);
    (void)pickles(source, where, Said::elements, depth);
  }

  // JSON and raw tensors, and in our own entry of the JSON archives of torch.save. A pickle may
  // look like one.
  std::optional<Error> refusal_of_safetensors(const ByteSource& source, const std::string& where,
                                              int depth) {
    try {
      const safetensors::Header header = safetensors::read_header(source);
      for_each_archive(header.metadata, [&](std::vector<std::byte> bytes) {
        const std::string inside = where + ":" + kTreeKey;
        guarded(inside, [&] {
          any(memory_source(std::move(bytes), inside), inside, Said::pickle, depth + 1);
        });
      });
    } catch (const Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      return error;
    }
    return std::nullopt;
  }

  // Storages are raw; anything else may be a pickle of its own.
  void archive(const Source& source, const std::string& where, int depth) {
    const zip::Archive archive(source);
    const std::string_view other = torch_file::other_kind(archive);
    if (!other.empty()) {
      problem(Error(ErrorCode::unsupported,
                    std::string(other) + ", whose own program is not looked into"),
              where);
    }
    for (const zip::Entry& entry : archive.entries()) {
      const std::string inside = where + ":" + entry.name;
      if (entry.name.ends_with(".pkl")) {
        (void)archive.read(entry, kPickleLimit);  // its CRC-32
      } else if (torch_file::is_storage(entry.name) && said_by(entry.name) == Said::nothing) {
        continue;
      }
      guarded(inside, [&] {
        any(slice_source(source, entry.data_offset, entry.size), inside, said_by(entry.name),
            depth + 1);
      });
    }
  }

  // One pickle, several of them, or torch's stream. What nobody says is a pickle counts as one
  // where it does something before it ends.
  bool pickles(const Source& source, const std::string& where, Said said, int depth) {
    std::uint64_t at = 0;
    const int most = torch_file::has_magic(*source) ? kStreamPickles : -1;
    for (int i = 0; i != most && (at < source->size() || i == 0); ++i) {
      require_going_on(stop_);
      const pickle::Found found = next(*source, at);
      if (!is_pickle(*source, at, found, said)) {
        if (at != 0) tell_rest(source->size() - at, at, where);
        return at != 0;
      }
      take(found, where, depth);
      if (found.consumed == 0) return true;
      at += found.consumed;
      said = std::min(said, Said::nothing);
    }
    return true;
  }

  static bool is_pickle(const ByteSource& source, std::uint64_t at, const pickle::Found& found,
                        Said said) {
    return said == Said::pickle || found.calls || (found.consumed > 0 && !found.names.empty()) ||
           (said == Said::nothing && starts_with_protocol(source, at));
  }

  void tell_rest(std::uint64_t size, std::uint64_t at, const std::string& where) {
    problem(Error(ErrorCode::unsupported, std::to_string(size) + " bytes follow the last pickle")
                .at_offset(at),
            where);
  }

  static bool starts_with_protocol(const ByteSource& source, std::uint64_t at) {
    if (source.size() - at < 2) return false;
    const std::vector<std::byte> start = bytes_of(source, at, 2);
    return start[0] == std::byte{0x80} && start[1] <= std::byte{5};
  }

  // The pickle at `at`, read in growing windows.
  pickle::Found next(const ByteSource& source, std::uint64_t at) {
    const std::uint64_t left = source.size() - at;
    for (std::uint64_t window = kFirstWindow;; window *= 16) {
      const std::uint64_t size = std::min({window, left, kPickleLimit});
      pickle::Found found = pickle::scan(bytes_of(source, at, size), is_torch_type);
      if (!found.cut || size == left) return found;
      if (size == kPickleLimit) throw Error(ErrorCode::limit, "a pickle of more than 4 GiB");
    }
  }

  void take(const pickle::Found& found, const std::string& where, int depth) {
    ++report_.pickles;
    for (const pickle::Finding& name : found.names) names_.add(name, where);
    for (const Error& error : found.problems) problem(error, where);
    for (const pickle::Nested& nested : found.nested) {
      const std::string inside = where + ":" + nested.taker;
      guarded(inside, [&] {
        const Source bytes = memory_source(nested.bytes, inside);
        if (nested.of_torch) return any(bytes, inside, Said::pickle, depth + 1);
        (void)pickles(bytes, inside, nested.must ? Said::pickle : Said::nothing, depth + 1);
      });
    }
  }

  std::shared_ptr<Store> store_;
  std::stop_token stop_;
  std::map<std::string, Source> sources_;  // data files, by name
  Names names_;
  ScanReport report_;
};

ScanReport scan_object(std::shared_ptr<Store> store, const std::string& name,
                       const ScanOptions& options) {
  Scan scan(std::move(store), options);
  scan.file(name, Said::pickle);
  return std::move(scan).report();
}

ScanReport scan_directory(const std::shared_ptr<Store>& store, const ScanOptions& options) {
  Scan scan(store, options);
  // As its readers do: where there is no `.metadata`, the ranks' own count.
  const bool merged = store->exists(kDcpMetadata);
  for (const ObjectInfo& object : store->list()) {
    // Pickles in data files are what `.metadata` names.
    if (!object.name.ends_with(".distcp")) scan.file(object.name, said_by(object.name));
    if (merged ? object.name == kDcpMetadata : is_rank_metadata(object.name))
      scan.items(object.name);
  }
  return std::move(scan).report();
}

}  // namespace

std::string_view to_string(NameKind kind) noexcept {
  constexpr std::array<std::string_view, 4> kNames{"vetted", "allowed", "unknown", "dangerous"};
  return kNames[static_cast<std::size_t>(kind)];
}

bool ScanReport::clean() const {
  return problems.empty() && std::ranges::none_of(names, [](const ScannedName& name) {
           return name.kind >= NameKind::unknown;
         });
}

ScanReport scan(const std::string& path, const ScanOptions& options) {
  namespace fs = std::filesystem;
  const Location where = located_source(path);
  if (where.store) {
    return where.name.empty() ? scan_directory(where.store, options)
                              : scan_object(where.store, where.name, options);
  }
  const fs::path file = where.path;
  std::error_code error;
  if (!fs::exists(file, error))
    throw Error(ErrorCode::not_found, "there is no such file or directory").at_path(path);
  if (fs::is_directory(file, error)) return scan_directory(posix_store(file.string()), options);
  return scan_object(posix_store(file.parent_path().string()), file.filename().string(), options);
}

}  // namespace tessera
