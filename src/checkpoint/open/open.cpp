#include "checkpoint/open/open.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/deepspeed.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/foreign.h"
#include "checkpoint/open/item_files.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/select.h"
#include "checkpoint/read/side_file.h"
#include "format/gguf/gguf.h"
#include "format/safetensors/index.h"
#include "format/torch/stream.h"
#include "io/source.h"
#include "layout/plan.h"
#include "storage/posix/replaced_directory.h"
#include "storage/posix/system.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/render.h"

namespace tessera {
namespace {

using Head = std::array<unsigned char, 10>;

bool is_zip(const Head& head) {
  return head[0] == 'P' && head[1] == 'K';
}

// From before torch 1.6; one in text says what it is.
bool is_stream(const Head& head, const ByteSource& source) {
  return head[0] == 0x80 || torch_file::is_text_stream(source);
}

// Formats of others that people have beside checkpoints, by their first bytes.
struct Foreign {
  std::string_view magic;
  std::string_view name;
};
constexpr std::array<Foreign, 7> kForeign{
    {{"\x89HDF\r\n\x1a\n", "an HDF5 file"},
     {"\x93NUMPY", "a .npy file of numpy"},
     {"\x1f\x8b", "compressed by gzip: unpack it first"},
     {"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"},
     {"\xfd"
      "7zXZ",
      "compressed by xz: unpack it first"},
     {"BZh", "compressed by bzip2: unpack it first"},
     {"\x7f"
      "ELF",
      "a program or library"}}};

void refuse_foreign(const Head& head, const ByteSource& source) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  for (const Foreign& foreign : kForeign) {
    if (!text.starts_with(foreign.magic)) continue;
    throw Error(ErrorCode::unsupported, "the file is " + std::string(foreign.name))
        .at_path(source.name());
  }
}

// Files that mean something in their directory alone.
void refuse_part(const Store& store, const std::string& name) {
  const std::string_view own = std::string_view(name).substr(name.rfind('/') + 1);
  if (own != kDcpMetadata && !is_rank_metadata(own) && !own.ends_with(".distcp")) return;
  throw Error(ErrorCode::incomplete,
              "the file is a part of a distributed checkpoint: open the directory that it is in")
      .at_path(store.name() + "/" + name);
}

bool is_gguf(const Head& head) {
  return gguf::kMagic == std::string_view(reinterpret_cast<const char*>(head.data()), 4);
}

// The content decides, not the name: a little-endian length and a brace is safetensors, a zip or a
// pickle is torch.save's. The brace comes before the zip: a length may begin with the bytes of
// "PK", while a zip has its first method there, and no method has that number. Of GGUF the number
// of tensors stands there, which may be a brace; no header of safetensors is as long as its magic.
CheckpointKind kind_of_file(const ByteSource& source) {
  if (source.size() == 0)
    throw Error(ErrorCode::incomplete, "the file is empty").at_path(source.name());
  const Head head = head_of<10>(source);
  if (is_gguf(head)) return CheckpointKind::gguf;
  if (head[8] == '{') return CheckpointKind::safetensors;
  refuse_foreign_archive(source);
  if (is_zip(head)) return CheckpointKind::torch_file;
  refuse_foreign(head, source);
  const auto named = kind_of_file_name(source.name());
  if (named && is_one_of(*named, CheckpointKind::safetensors, CheckpointKind::gguf)) return *named;
  if (is_stream(head, source) || named == CheckpointKind::torch_file)
    return CheckpointKind::torch_file;
  throw Error(ErrorCode::corrupt, "neither a zip of torch.save nor a safetensors file")
      .at_path(source.name());
}

// A link such as `latest` that leads nowhere.
[[noreturn]] void refuse_link(const std::string& path) {
  std::error_code none;
  const std::string target = std::filesystem::read_symlink(path, none).string();
  const std::string newest = newest_beside(path);
  throw Error(ErrorCode::not_found,
              "the link leads to " + printable(target, 200) + ", which is not there" +
                  (newest.empty() ? "" : "; the newest checkpoint beside it is " + newest))
      .at_path(path);
}

// Whether no step of an absolute or relative path is a link or a file: then nothing was there.
bool was_never_there(std::filesystem::path path) {
  for (; !path.empty() && path != path.root_path(); path = path.parent_path()) {
    if (!path.has_filename()) continue;  // a slash at the end
    std::error_code failure;
    const auto type = std::filesystem::symlink_status(path, failure).type();
    if (type == std::filesystem::file_type::directory) return true;
    if (type != std::filesystem::file_type::not_found) return false;
  }
  return true;
}

// Where links lead, whose end has no name of an index any more where it is a blob of the Hub's
// cache: the index is about what lies beside the last one that has.
std::filesystem::path end_of_index_links(std::filesystem::path index) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  for (int i = 0; i < kMostLinks; ++i) {
    std::error_code none;
    const std::filesystem::path next = std::filesystem::read_symlink(index, none);
    if (none || !safetensors::is_index(next.filename().string())) break;
    index = index.parent_path() / next;  // `next` alone if it is absolute
  }
  return index;
}

// Who names a link means what it leads to, wherever that is.
std::filesystem::path named_file(const std::string& path) {
  const std::filesystem::path file = path;
  return safetensors::is_index(file.filename().string())
             ? end_of_index_links(file)
             : std::filesystem::path(end_of_links(path));
}

// The place for a path at which there is nothing: a crash while an OLMo directory was replaced may
// have left the old one under another name.
Place replaced_place(const std::string& path) {
  if (errno != ENOENT && errno != ENOTDIR) throw_errno(errno, "open", path);
  const std::string replaced = replaced_directory_of(path);
  if (!replaced.empty()) return {posix_store(replaced)};
  if (std::error_code none; std::filesystem::is_symlink(path, none)) refuse_link(path);
  Error error(ErrorCode::not_found, "there is no such file or directory");
  if (was_never_there(path)) error.as_no_checkpoint();
  throw error.at_path(path);
}

// Whether a store says so: one that fails does not.
template <typename Ask>
bool is_so(const Ask& ask) {
  try {
    return ask();
  } catch (const Error&) {
    return false;
  }
}

// Stores of files have absolute names, others URLs or none.
bool is_directory_of_disk(const Store& store) {
  return store.name().starts_with('/');
}

// Whether an object that cannot be found is in no listing either. A store that lists nothing, or
// that cannot be reached, does not say so.
bool is_unlisted(const Location& where) {
  const Store& store = *where.store;
  if (is_directory_of_disk(store)) return was_never_there(store.name() + "/" + where.name);
  return is_so([&] { return store.list(where.name).empty(); });
}

// The size of the object that the location names.
std::uint64_t size_of_named(const Location& where) {
  try {
    return where.store->open(where.name)->size();
  } catch (Error& error) {
    if (error.code() == ErrorCode::not_found && is_unlisted(where)) error.as_no_checkpoint();
    throw;
  }
}

constexpr std::string_view kMetadataOfUrl = "/.metadata";

// Who names the `.metadata` of a DCP checkpoint means the directory that it is in.
Place named_place(const Location& where) {
  const std::size_t slash = where.name.rfind('/');
  if (where.name.substr(slash == std::string::npos ? 0 : slash + 1) != kDcpMetadata)
    return {where.store, ObjectInfo{where.name, size_of_named(where)}};
  if (slash == std::string::npos) return {where.store};
  return {directory_store({where.store, where.name.substr(0, slash)})};
}

bool any_ends_with(const std::vector<ObjectInfo>& files, std::string_view suffix) {
  return std::ranges::any_of(
      files, [suffix](const ObjectInfo& file) { return file.name.ends_with(suffix); });
}

// A save without collectives, of which nothing is merged yet.
bool has_rank_metadata(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, is_rank_metadata, &ObjectInfo::name);
}

// The last one: an interrupted conversion that is to be resumed (docs/design/resume.md).
bool is_unfinished(const Store& store, const std::vector<ObjectInfo>& files) {
  return any_ends_with(files, ".distcp") || any_ends_with(files, ".metadata.tmp") ||
         store.exists(".resume/lock");
}

// What a run leaves that no checkpoint is made of.
bool is_of_no_checkpoint(std::string_view name) {
  constexpr std::string_view kEnds[] = {".log", ".txt", ".md",   ".csv",  ".jsonl", ".json",
                                        ".yml", ".py",  ".yaml", ".toml", ".sh",    ".lock"};
  return name.find("tfevents") != std::string_view::npos ||
         std::ranges::any_of(kEnds, [name](std::string_view end) { return name.ends_with(end); });
}

// Whether somebody may take the directory for one in which nothing was saved. Directories, links
// and files of other names may be a checkpoint's, in a form that is not read or not whole.
bool may_begin_in(const Store& store) {
  if (!store.list_directories().empty()) return false;
  const std::vector<ObjectInfo> files = store.list_level();
  if (!std::ranges::all_of(files, is_of_no_checkpoint, &ObjectInfo::name)) return false;
  if (!is_directory_of_disk(store)) return true;
  std::error_code failure;
  const auto entries = std::filesystem::directory_iterator(store.name(), failure);
  if (failure) return was_never_there(store.name());
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries))) == files.size();
}

[[noreturn]] void refuse_directory(const Store& store, const std::vector<ObjectInfo>& files) {
  if (is_unfinished(store, files)) {
    throw Error(ErrorCode::incomplete, "data files without a .metadata: the save never finished")
        .at_path(store.name());
  }
  refuse_foreign_directory(store, files);
  Error error(ErrorCode::not_found,
              "no checkpoint in this directory: no .metadata, no *.safetensors, no rank*.pt, no "
              "pytorch_model.bin");
  if (is_so([&] { return may_begin_in(store); })) error.as_no_checkpoint();
  throw error.at_path(store.name());
}

// A kind of directory, by the files that decide.
struct DirectoryKind {
  CheckpointKind kind;
  bool (*has_files)(const std::vector<ObjectInfo>& files);
  Checkpoint (*open)(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& files,
                     const OpenOptions& options);
};

// An opener that does not need both the files and the options.
template <auto open>
constexpr auto kOpener = [](const std::shared_ptr<Store>& store,
                            const std::vector<ObjectInfo>& files,
                            [[maybe_unused]] const OpenOptions& options) {
  if constexpr (requires { open(store, files); }) {
    return open(store, files);
  } else if constexpr (requires { open(store, options); }) {
    return open(store, options);
  } else {
    return open(store);
  }
};

// The first that has files is the directory's. Of `rank{r}.pt` their content says whether they are
// OLMo's.
constexpr std::array<DirectoryKind, 12> kDirectoryKinds{
    {{CheckpointKind::olmo_torch_new, has_torch_new_files, kOpener<open_olmo_torch_new>},
     {CheckpointKind::olmo_full, has_full_files, kOpener<open_olmo_full>},
     {CheckpointKind::dcp, has_rank_metadata, kOpener<open_dcp>},
     {CheckpointKind::olmo_local, has_local_files, kOpener<open_local>},
     {CheckpointKind::olmo_legacy, has_rank_files, kOpener<open_rank_files>},
     {CheckpointKind::rank_files, has_world_size_files, kOpener<open_world_size_files>},
     {CheckpointKind::deepspeed, has_deepspeed_files, kOpener<open_deepspeed>},
     {CheckpointKind::safetensors, has_safetensors, open_safetensors_directory},
     {CheckpointKind::torch_file, has_torch_set, open_torch_directory},
     {CheckpointKind::dcp, has_parts, kOpener<open_parts>},
     {CheckpointKind::rank_files, has_item_files, kOpener<open_item_files>},
     {CheckpointKind::arena, has_arena_files, kOpener<open_arena>}}};

const DirectoryKind* kind_of_directory(const std::vector<ObjectInfo>& files) {
  const auto* const found = std::ranges::find_if(
      kDirectoryKinds, [&files](const DirectoryKind& kind) { return kind.has_files(files); });
  return found == kDirectoryKinds.end() ? nullptr : found;
}

std::vector<Slice> slices_of(const Tensor& tensor) {
  std::vector<Slice> slices;
  for (const Piece& piece : tensor.pieces) slices.push_back(piece.slice);
  return slices;
}

// The checkpoint in a directory without a `.metadata` of its own.
Checkpoint open_directory(std::shared_ptr<Store> store, const OpenOptions& options) {
  const std::vector<ObjectInfo> files = deciding_files(*store);
  const DirectoryKind* const kind = kind_of_directory(files);
  // An index says what is missing of its set, and a choice among files asks their digests.
  const bool is_set = kind != nullptr && is_one_of(kind->kind, CheckpointKind::safetensors,
                                                   CheckpointKind::torch_file);
  store = guard_directory(std::move(store), is_set);
  if (kind == nullptr) refuse_directory(*store, files);
  Checkpoint checkpoint = kind->open(store, files, options);
  if (kind->kind != CheckpointKind::arena) remark_left_behind(files, checkpoint);
  return checkpoint;
}

void require_same_save(const Store& store, std::uint64_t save) {
  if (save == 0 || save_mark_of(store) == save) return;
  throw Error(ErrorCode::conflict, "the checkpoint was replaced while it was opened")
      .at_path(store.name());
}

Checkpoint open_of_one_save(const std::shared_ptr<Store>& store, const OpenOptions& options) {
  // The directory is replaced whole, so files that are opened one after another may be of two
  // saves.
  const std::uint64_t save = save_mark_of(*store);
  std::optional<Checkpoint> checkpoint;
  try {
    checkpoint = open_directory(store, options);
  } catch (const Error&) {
    require_same_save(*store, save);
    throw;
  }
  require_same_save(*store, save);
  return std::move(*checkpoint);
}

}  // namespace

Place place_of(const Location& given) {
  if (!given.store && !is_on_disk(given) && given.path.ends_with(kMetadataOfUrl))
    return place_of(Location(given.path.substr(0, given.path.size() - kMetadataOfUrl.size())));
  const Location where = located_source(given);
  if (where.store) {
    if (where.name.empty()) return {where.store};
    return named_place(where);
  }
  const std::string& path = where.path;
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return replaced_place(path);
  if (S_ISDIR(status.st_mode)) return {posix_store(path)};
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::io,
                "a checkpoint is read at many places: it has to be a file, not a pipe or a device")
        .at_path(path);
  }
  const std::filesystem::path file = named_file(path);
  if (file.filename() == kDcpMetadata) return {posix_store(file.parent_path().string())};
  Place place{posix_store(file.parent_path().string()),
              ObjectInfo{file.filename().string(), static_cast<std::uint64_t>(status.st_size)}};
  // An index stands for all of its directory.
  if (!safetensors::is_index(place.object->name)) place.path = path;
  return place;
}

std::vector<ObjectInfo> deciding_files(const Store& store) {
  std::vector<ObjectInfo> files = store.list_level();
  const auto add = [&](const std::string& folder) {
    for (ObjectInfo& file : store.list_level(folder)) files.push_back(std::move(file));
  };
  const bool is_dcp = has_object(files, kDcpMetadata);
  for (const char* part : {"model", "model_and_optim"}) add(part);
  if (const auto latest = deepspeed::latest_of(store, files)) add(*latest);
  const auto found = std::ranges::find_if(files, deepspeed::is_file, &ObjectInfo::name);
  if (found != files.end()) {
    const std::string directory = found->name.substr(0, found->name.rfind('/') + 1);
    add(directory + std::string(deepspeed::kUniversalFolder));
  }
  // Folders with numbers in their names are another look into the store.
  if (is_dcp || kind_of_directory(files) != nullptr) return files;
  for (const std::string& folder : store.list_directories()) {
    if (is_part_folder(folder)) add(folder);
  }
  return files;
}

bool has_known_kind(const Store& store) {
  if (store.exists(kDcpMetadata)) return true;
  const std::vector<ObjectInfo> files = deciding_files(store);
  return kind_of_directory(files) != nullptr || is_unfinished(store, files);
}

std::optional<CheckpointKind> kind_by_names(const Store& store) {
  if (store.exists(kDcpMetadata)) return CheckpointKind::dcp;
  const DirectoryKind* const found = kind_of_directory(deciding_files(store));
  return found == nullptr ? std::nullopt : std::optional(found->kind);
}

std::optional<CheckpointKind> olmo_kind_of(const Store& store) {
  const std::optional<CheckpointKind> kind = kind_by_names(store);
  if (!kind || !is_one_of(*kind, CheckpointKind::olmo_torch_new, CheckpointKind::olmo_full,
                          CheckpointKind::olmo_local, CheckpointKind::olmo_legacy)) {
    return std::nullopt;
  }
  return kind;
}

std::optional<CheckpointKind> olmo_kind_at(const Location& where) {
  const Place place = place_of(where);
  return place.object ? std::nullopt : olmo_kind_of(*place.store);
}

Checkpoint open_checkpoint(const Place& place, const OpenOptions& options) {
  require_known_faults(options);
  if (!place.object) return open_checkpoint(place.store, options);
  Checkpoint checkpoint = open_checkpoint(place.store, *place.object, options);
  if (!place.path.empty()) checkpoint.path = place.path;
  return checkpoint;
}

Checkpoint open_checkpoint(std::shared_ptr<Store> store, const ObjectInfo& object,
                           const OpenOptions& options) {
  refuse_part(*store, object.name);
  if (options.rank) {
    throw Error(ErrorCode::invalid_argument, "the option --rank has no effect on one file")
        .at_path(store->name() + "/" + object.name);
  }
  // All of the directory, by what its files say.
  if (options.ignore_index && safetensors::is_index(object.name))
    return open_checkpoint(std::move(store), options);
  store = guard_file(std::move(store), object);
  if (object.name.ends_with(safetensors::kIndexSuffix))
    return open_safetensors_index(store, object.name, options);
  if (safetensors::is_index(object.name)) return open_torch_index(store, object.name, options);
  switch (kind_of_file(*store->open(object.name))) {
    case CheckpointKind::torch_file:
      return open_torch(store, object, options);
    case CheckpointKind::gguf:
      return open_gguf(store, object, options);
    default:
      return open_safetensors(store, {object}, options);
  }
}

Checkpoint open_checkpoint(std::shared_ptr<Store> store, const OpenOptions& options) {
  if (!store->exists(kDcpMetadata)) return open_of_one_save(store, options);
  Checkpoint checkpoint = open_dcp(std::move(store), options);
  remark_left_behind(checkpoint.store->list_level(), checkpoint);
  return checkpoint;
}

void warn_of_holes(const std::vector<std::string>& names, std::vector<std::string>& warnings) {
  if (names.empty()) return;
  std::string text = "the file has nothing for " + printable(names[0], 200);
  if (names.size() > 1) text += " and " + std::to_string(names.size() - 1) + " more";
  warnings.push_back(text + ": taken for empty dicts, which PyTorch leaves out of lists");
}

void require_coverage(const Checkpoint& checkpoint) {
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    try {
      if (tensor.pieces.size() == 1) {
        require_covered_once(tensor.shape, std::span(&tensor.pieces[0].slice, 1));
      } else {
        require_covered_once(tensor.shape, slices_of(tensor));
      }
    } catch (Error& error) {
      throw error.at_key(leaf.name).at_path(checkpoint.path);
    }
  }
}

// A part of a checkpoint's leaves, by names, beginnings of names and globs.

Checkpoint Checkpoint::only(const std::vector<std::string>& keys) const {
  Choice choice(leaves);
  for (const std::string& key : keys) {
    if (!choice.add(key)) refuse_key(key, leaves, path);
  }
  std::size_t at = 0;
  Checkpoint made = map([&](Leaf leaf) -> std::optional<Leaf> {
    return choice.has(at++) ? std::optional(std::move(leaf)) : std::nullopt;
  });
  if (!fill_holes(made.leaves).empty()) made.index_names();
  return made;
}

namespace {

// What a function has made of a leaf; its own name is kept in step with what it holds.
Leaf kept_leaf(const Leaf& leaf, Leaf given) {
  std::string name = std::exchange(given.name, leaf.name);
  if (name.empty()) throw Error(ErrorCode::conflict, "a leaf lost its name").at_key(leaf.name);
  if (name != leaf.name) rename(given, std::move(name));
  return given;
}

// `by_name`: the indices of the leaves, sorted by their names.
void require_own_names(const std::vector<Leaf>& leaves, const std::vector<std::uint32_t>& by_name) {
  const auto name_at = [&leaves](std::uint32_t at) -> const std::string& {
    return leaves[at].name;
  };
  const auto same = std::ranges::adjacent_find(by_name, {}, name_at);
  if (same != by_name.end())
    throw Error(ErrorCode::conflict, "two leaves get one name").at_key(printable(name_at(*same)));
}

}  // namespace

Checkpoint Checkpoint::map(const LeafFunction& fn) const {
  Checkpoint made = *this;
  made.mapped = true;
  made.root.reset();
  made.files.clear();  // those that tensors lie in are known by their pieces
  made.leaves.clear();
  for (const Leaf& leaf : leaves) {
    std::optional<Leaf> given = fn(leaf);
    if (!given) continue;
    made.leaves.push_back(kept_leaf(leaf, std::move(*given)));
  }
  made.index_names();
  require_own_names(made.leaves, made.by_name_);
  return made;
}

}  // namespace tessera
