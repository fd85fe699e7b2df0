#include "tessera/verify.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/expression.h"
#include "base/numbers.h"
#include "base/parallel.h"
#include "base/text.h"
#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/zstd.h"
#include "format/exported/exported.h"
#include "format/gguf/gguf.h"
#include "format/pickle/scan.h"
#include "format/safetensors/safetensors.h"
#include "format/torch/rebuild.h"
#include "format/torch/records.h"
#include "format/torch/stream.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"
#include "io/source.h"
#include "storage/forwarding_store.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "value/known.h"

namespace tessera {
namespace {

constexpr std::uint64_t kPickleLimit = std::uint64_t{4} << 30;  // bytes of one pickle
constexpr std::uint64_t kFirstWindow = 16 << 10;  // bytes read in the hope of a whole one
constexpr int kStreamPickles = 5;  // of torch's stream before 1.6; raw storages follow
constexpr int kMaxNesting = 8;     // of pickles and archives in each other
constexpr std::size_t kMaxProblems = 1000;

constexpr std::string_view kNumpy = "\x93NUMPY";

using Source = std::shared_ptr<const ByteSource>;

// The kind that bytes are said to be.
enum class Said : std::uint8_t {
  elements,  // of a tensor: nothing else counts than what does something when it is unpickled
  nothing,   // a pickle only if it looks like one
  pickle,    // anything else is a problem
};

// A dtype or a storage class.
bool is_torch_type(const std::string& module, const std::string& name) {
  return is_one_of(module, "torch", "torch.storage") &&
         (torch_file::is_storage_class(name) || is_torch_dtype(name));
}

// The first bytes of a file, which say what it is.
using Head = std::array<unsigned char, 512>;

struct Magic {
  std::string_view bytes;
  const char* what;
};

// Formats that Python's readers of pickles look into and this one does not.
constexpr auto kForeign = std::to_array<Magic>({
    {"7z\xbc\xaf\x27\x1c", "a 7z archive"},
    {"Rar!", "a RAR archive"},
    {"\x1f\x8b", "a file compressed by gzip"},
    {"BZh", "a file compressed by bzip2"},
    {std::string_view("\xfd"
                      "7zXZ\0",
                      6),
     "a file compressed by xz"},
    {"\x28\xb5\x2f\xfd", "a file compressed by zstd"},
    {"\x04\x22\x4d\x18", "a file compressed by lz4"},
});

bool begins(std::span<const unsigned char> head, std::string_view bytes) {
  return std::memcmp(head.data(), bytes.data(), bytes.size()) == 0;
}

const Magic* foreign_kind(const Head& head) {
  const auto* found = std::ranges::find_if(
      kForeign, [&head](const Magic& magic) { return begins(head, magic.bytes); });
  return found == kForeign.end() ? nullptr : found;
}

// The number in a field of a tar header, in any form that Python's reader takes; -1: none.
long number_of_tar(std::string_view field) {
  long number = 0;
  if (is_one_of(field[0], '\x80', '\xff')) {
    for (const char c : field.substr(field.size() - 4)) number = number << 8 | (c & 0xff);
    return number;
  }
  field = field.substr(0, field.find('\0'));
  std::string digits;
  for (const char c : field)
    if (!is_one_of(c, ' ', '\t', '\n', '\v', '\f', '\r', '_', '+')) digits += c;
  std::string_view text = digits;
  if (text.starts_with("0o") || text.starts_with("0O")) text.remove_prefix(2);
  for (const char c : text) {
    if (c < '0' || c > '7') return -1;
    number = number * 8 + (c - '0');
  }
  return number;
}

// A first header of a tar archive, of any age: its checksum is right. Python's reader asks for
// nothing else.
bool is_tar(const Head& head) {
  constexpr std::size_t kSum = 148;
  constexpr std::size_t kDigits = 8;
  const auto* field = reinterpret_cast<const char*>(head.data()) + kSum;
  const long stored = number_of_tar({field, kDigits});
  if (stored < 0) return false;
  long sum = 0;
  long with_signs = 0;
  for (std::size_t i = 0; i < head.size(); ++i) {
    const bool own = i >= kSum && i < kSum + kDigits;
    sum += own ? ' ' : head[i];
    with_signs += own ? ' ' : static_cast<signed char>(head[i]);
  }
  return is_one_of(stored, sum, with_signs);
}

// The number that begins there; at most 18 digits are looked at.
std::uint64_t number_at(std::string_view text, std::size_t from) {
  std::uint64_t number = 0;
  for (std::size_t i = from; i < std::min(text.size(), from + 18); ++i) {
    if (text[i] < '0' || text[i] > '9') break;
    number = number * 10 + static_cast<std::uint64_t>(text[i] - '0');
  }
  return number;
}

// Bytes of the elements that the header of a .npy file says, where it has the form that numpy
// writes for elements without fields and without objects; none: another form.
constexpr const char* kPlainArray =
    R"(\{'descr': '[<>|=][biufcSUVmM]\d{1,9}(\[\w+\])?', 'fortran_order': (True|False), )"
    R"('shape': \([\d, ]*\), \}\s*)";
std::optional<std::uint64_t> plain_array_size(const Expression& plain, const std::string& header) {
  if (!plain.matches(header)) return std::nullopt;
  const std::size_t code = header.find("'descr': '") + 11;
  std::uint64_t size = number_at(header, code + 1) * (header[code] == 'U' ? 4 : 1);
  const std::size_t end = header.rfind(')');
  for (std::size_t at = header.find('(') + 1; at < end;) {
    at = std::min(header.find_first_of("0123456789", at), end);
    if (at == end) break;
    size = checked_mul(size, number_at(header, at));
    at = header.find_first_not_of("0123456789", at);
  }
  return size;
}

std::vector<std::byte> bytes_of(const ByteSource& source, std::uint64_t at, std::uint64_t size) {
  std::vector<std::byte> bytes(size);
  source.read_at(at, bytes);
  return bytes;
}

// Readers of archives compare names without case.
Said said_by(std::string_view name) {
  constexpr std::array<std::string_view, 11> kSuffixes = {
      ".pt",       ".pth", ".bin",    ".ckpt", ".pkl", ".pickle",
      ".metadata", ".th",  ".joblib", ".dill", ".pt2"};
  const bool pickle = std::ranges::any_of(
      kSuffixes,
      [text = lowered(name)](std::string_view suffix) { return text.ends_with(suffix); });
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
  explicit Names(const std::vector<std::string>& allow)
      : allow_(allow), globs_(allow.begin(), allow.end()) {}

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
    return std::ranges::find(allow_, name) != allow_.end() ||
           std::ranges::any_of(globs_, [&name](const Glob& glob) { return glob.fits(name); });
  }

  const std::vector<std::string>& allow_;
  std::vector<Glob> globs_;  // the same
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

  // Every item that a `.metadata` names, in the directory where it lies.
  void items(const std::string& name) {
    guarded(name, [&] {
      const dcp::Metadata metadata = dcp::decode(read_all(*store_->open(name), kMetadataLimit));
      const std::string folder = name.substr(0, name.rfind('/') + 1);
      for (const dcp::Entry& entry : metadata.entries) {
        if (!entry.is_tensor) item(folder, entry.item, entry.name, Said::pickle);
        for (std::size_t i = 0; i < entry.chunks.size(); ++i)
          item(folder, entry.chunks[i].item, entry.name,
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
    report_.problems.emplace_back(error.at_path(store_->name() + "/" + where));
  }

  void item(const std::string& folder, const dcp::Item& item, const std::string& key, Said said) {
    const std::string path = folder + item.path;
    guarded(path, [&] {
      auto& source = sources_[path];
      if (!source) source = store_->open(path);
      Source bytes = slice_source(source, item.offset, item.length);
      if (encoding_of(view_of(item)) == Encoding::torch_item_zstd)
        bytes = zstd_source(std::move(bytes), kPickleLimit);
      any(bytes, path + ":" + key, said, 0);
    });
  }

  // Anything, by its first bytes. More than one reader may take them: each is followed.
  void any(const Source& source, const std::string& where, Said said, int depth) {
    if (depth > kMaxNesting) throw Error(ErrorCode::limit, "pickles in pickles in pickles");
    const Head head = head_of<512>(*source);
    if (said == Said::elements) return elements(source, where, head, depth);
    if (is_tar(head)) throw Error(ErrorCode::unsupported, "a tar archive is not looked into");
    if (begins(head, "PK"))
      return archive(zip::Archive(source, zip::Deflated::allow), source, where, depth);
    if (const Magic* foreign = foreign_kind(head))
      throw Error(ErrorCode::unsupported, std::string(foreign->what) + " is not looked into");
    if (begins(head, kNumpy)) return array(source, where, head, depth);
    header_or_pickle(source, where, head, said, depth);
  }

  template <typename Read>
  static std::optional<Error> refusal_of(const Read& read) {
    try {
      read();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      return error;
    }
    return std::nullopt;
  }

  // A header of raw tensors, or a pickle: one may look like the other. The letters of GGUF are the
  // opcode of a number.
  void header_or_pickle(const Source& source, const std::string& where, const Head& head, Said said,
                        int depth) {
    const bool like_gguf = begins(head, gguf::kMagic);
    const bool like_safetensors = head[8] == '{' && source->size() > 8;  // a length and a brace
    std::optional<Error> refusal;
    if (like_gguf) {
      refusal = refusal_of([&] { (void)gguf::read_header(*source); });
    } else if (like_safetensors) {
      refusal = refusal_of([&] { in_safetensors(*source, where, depth); });
    }
    const bool like_other = like_gguf || like_safetensors;
    const bool pickle = pickles(source, where, like_other ? Said::nothing : said, depth);
    const bool named =
        said == Said::pickle || where.ends_with(".safetensors") || where.ends_with(".gguf");
    if (refusal && !pickle && named) problem(*refusal, where);
  }

  // An array of numpy. Objects are a pickle behind the header.
  void array(const Source& source, const std::string& where, const Head& head, int depth) {
    const std::uint64_t begin = head[6] >= 2 ? 12 : 10;
    const auto bytes = std::as_bytes(std::span(head));
    const std::uint64_t size =
        head[6] >= 2 ? load_le<std::uint32_t>(&bytes[8]) : load_le<std::uint16_t>(&bytes[8]);
    if (source->size() < begin || size > std::min<std::uint64_t>(source->size() - begin, 1 << 20))
      throw Error(ErrorCode::corrupt, "the header of an array of numpy leaves the file");
    const std::vector<std::byte> raw = bytes_of(*source, begin, size);
    const auto plain =
        plain_array_size(plain_array_, {reinterpret_cast<const char*>(raw.data()), raw.size()});
    const std::uint64_t data = begin + size;
    if (!plain) {
      pickles(slice_source(source, data, source->size() - data), where, Said::pickle, depth);
    } else if (*plain != source->size() - data) {
      throw Error(ErrorCode::unsupported, "the elements of an array of numpy take " +
                                              std::to_string(*plain) + " bytes, the file has " +
                                              std::to_string(source->size() - data));
    }
  }

  // What a reader that knows only torch.save would take for one.
  void elements(const Source& source, const std::string& where, const Head& head, int depth) {
    if (const auto opened = begins(head, "PK") ? archive_of(source) : std::nullopt)
      return archive(*opened, source, where, depth);
    (void)pickles(source, where, Said::elements, depth);
  }

  // None: it is no archive.
  static std::optional<zip::Archive> archive_of(const Source& source) {
    try {
      return zip::Archive(source, zip::Deflated::allow);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      return std::nullopt;
    }
  }

  // JSON and raw tensors, and in our own entry of the JSON archives of torch.save.
  void in_safetensors(const ByteSource& source, const std::string& where, int depth) {
    const safetensors::Header header = safetensors::read_header(source);
    for_each_archive(header.metadata, [&](std::vector<std::byte> bytes) {
      const std::string inside = where + ":" + kTreeKey;
      guarded(inside, [&] {
        any(memory_source(std::move(bytes), inside), inside, Said::pickle, depth + 1);
      });
    });
  }

  // Storages are raw; anything else may be a pickle of its own.
  void archive(const zip::Archive& archive, const Source& source, const std::string& where,
               int depth) {
    for (const std::string& program : torch_file::programs_in(archive))
      problem(Error(ErrorCode::unsupported, program), where);
    // Whichever kind it is first: torch.export.load asks for its own records alone.
    const bool is_other = torch_file::kind_of(archive) != torch_file::ArchiveKind::torch_save;
    std::set<std::string> pickled;
    guarded(where, [&] {
      if (is_other) pickled = exported::pickled_entries(archive);
    });
    for (const zip::Entry& entry : archive.entries()) {
      Said said = pickled.contains(entry.name) ? Said::pickle : said_by(entry.name);
      const std::string inside = where + ":" + entry.name;
      // By its CRC-32, and what is deflated as it was.
      const bool is_read = entry.deflated || lowered(entry.name).ends_with(".pkl");
      Source bytes = is_read ? memory_source(archive.read(entry, kPickleLimit), inside)
                             : slice_source(source, entry.data_offset, entry.size);
      if (said == Said::nothing && torch_file::is_raw(entry.name) &&
          !begins(head_of<kNumpy.size()>(*bytes), kNumpy)) {
        if (!is_other) continue;  // numpy takes any name
        said = Said::elements;    // a table of the archive says whether it is a pickle
      }
      guarded(inside, [&] { any(bytes, inside, said, depth + 1); });
    }
  }

  // One pickle, several of them, or torch's stream. What nobody says is a pickle counts as one
  // where it does something before it ends.
  bool pickles(const Source& source, const std::string& where, Said said, int depth) {
    if (said != Said::elements && torch_file::has_magic(*source)) {
      stream(source, where, depth);
      return true;
    }
    std::uint64_t at = 0;
    for (bool first = true; first || at < source->size(); first = false) {
      require_going_on(stop_);
      const pickle::Found found = next(*source, at);
      if (!is_pickle(*source, at, found, first ? said : Said::nothing)) {
        if (at != 0) tell_rest(source->size() - at, at, where);
        return at != 0;
      }
      take(found, where, depth);
      if (found.consumed == 0) return true;
      at += found.consumed;
    }
    return true;
  }

  // A stream of torch: five pickles, and behind them the storages that these list and nothing else.
  // Its reader says so.
  void stream(const Source& source, const std::string& where, int depth) {
    std::uint64_t at = 0;
    for (int i = 0; i < kStreamPickles && (i == 0 || at < source->size()); ++i) {
      const pickle::Found found = next(*source, at);
      take(found, where, depth);
      if (found.consumed == 0) return;
      at += found.consumed;
    }
    try {
      (void)torch_file::read_stream(source);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsafe) throw;  // its name is told
    }
  }

  // Text that only names something is none: words become imports. What is dangerous counts.
  static bool is_pickle(const ByteSource& source, std::uint64_t at, const pickle::Found& found,
                        Said said) {
    const bool dangerous = std::ranges::any_of(found.names, [](const pickle::Finding& name) {
      return name.verdict == pickle::Verdict::dangerous;
    });
    return said == Said::pickle || found.calls || dangerous || found.limited ||
           (found.consumed > 0 && !found.names.empty()) ||
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
      const bool is_last = size == left || size == kPickleLimit;
      const std::vector<std::byte> bytes = bytes_of(source, at, size);
      // The first window says what it is, and the others cost little until it is whole.
      if (window > kFirstWindow && !is_last && pickle::is_cut(bytes)) continue;
      pickle::Found found = pickle::scan(bytes, is_torch_type);
      if (!found.cut || size == left) return found;
      if (is_last) throw Error(ErrorCode::limit, "a pickle of more than 4 GiB");
    }
  }

  void take(const pickle::Found& found, const std::string& where, int depth) {
    ++report_.pickles;
    for (const pickle::Finding& name : found.names) names_.add(name, where);
    for (const Error& error : found.problems) problem(error, where);
    for (const pickle::Nested& nested : found.nested) {
      const auto* begin = reinterpret_cast<const char*>(nested.bytes.data());
      if (!nested_.emplace(nested.taker, std::string(begin, nested.bytes.size())).second) continue;
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
  std::map<std::string, Source> sources_;                 // data files, by name
  std::set<std::pair<std::string, std::string>> nested_;  // what was taken, and by what
  const Expression plain_array_{kPlainArray};
  Names names_;
  ScanReport report_;
};

ScanReport scan_object(const std::shared_ptr<Store>& store, const std::string& name,
                       const ScanOptions& options) {
  Scan scan(store, options);
  if (!safetensors::is_index(name)) {
    scan.file(name, Said::pickle);
    return std::move(scan).report();
  }
  // An index stands for the set, as everywhere.
  std::set<std::string> files;
  for (const auto& [tensor, file] : read_set_index(*store, name).files) files.insert(file);
  for (const std::string& file : files) scan.file(file, said_by(file));
  return std::move(scan).report();
}

// `.metadata`, or what a rank has written: torch falls back to these.
bool is_metadata(std::string_view name) {
  name.remove_prefix(name.rfind('/') + 1);
  return name == kDcpMetadata || is_rank_metadata(name);
}

// Whether a file of that name is a checkpoint's, whatever is in it. Others may be, too.
bool is_named_so(const std::string& name) {
  return said_by(name) == Said::pickle || is_metadata(name) || name.ends_with(".safetensors") ||
         name.ends_with(".gguf") || name.ends_with(".distcp");
}

// What is not looked into when a directory is listed: links to directories, and what is closed.
void tell_unseen(const std::string& directory, ScanReport& report) {
  try {
    for (const DirectoryEntry& entry : entries_of(directory)) {
      std::error_code none;
      if (entry.is_directory) {
        tell_unseen(entry.path, report);
      } else if (!entry.is_regular_file && std::filesystem::is_directory(entry.path, none)) {
        report.problems.emplace_back(
            Error(ErrorCode::unsupported, "a link to a directory is not followed")
                .at_path(entry.path));
      }
    }
  } catch (const Error& error) {
    report.problems.emplace_back(error);
  }
}

// `path`: of a directory on a disk; else empty.
ScanReport scan_directory(const std::shared_ptr<Store>& store, const ScanOptions& options,
                          const std::string& path = "") {
  Scan scan(store, options);
  const std::vector<ObjectInfo> objects = store->list();
  for (const ObjectInfo& object : objects) {
    // Pickles in data files are what `.metadata` names.
    if (!object.name.ends_with(".distcp")) scan.file(object.name, said_by(object.name));
    if (is_metadata(object.name)) scan.items(object.name);
  }
  ScanReport report = std::move(scan).report();
  if (!path.empty()) tell_unseen(path, report);
  const bool is_one = report.pickles > 0 || !report.problems.empty() ||
                      std::ranges::any_of(objects, is_named_so, &ObjectInfo::name);
  if (is_one) return report;
  throw Error(ErrorCode::not_found, "the directory has no file of a checkpoint")
      .at_path(store->name())
      .as_no_checkpoint();
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
  const HeedStop heeding(options.stop);
  const Location where = located_source(path);
  if (where.store) {
    return where.name.empty() ? scan_directory(where.store, options)
                              : scan_object(where.store, where.name, options);
  }
  fs::path file = where.path;
  std::error_code error;
  if (!fs::exists(file, error))
    throw Error(ErrorCode::not_found, "there is no such file or directory").at_path(path);
  if (fs::is_directory(file, error)) {
    return scan_directory(posix_store(file.string()), options, file.string());
  }
  // The files of a set are beside its index, not beside what a link to that leads to.
  if (!safetensors::is_index(file.filename().string())) file = end_of_links(file.string());
  return scan_object(posix_store(file.parent_path().string()), file.filename().string(), options);
}

}  // namespace tessera
