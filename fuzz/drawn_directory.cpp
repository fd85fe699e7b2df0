#include "drawn_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "base/digest.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace tessera::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFolders[] = {
    "", "", "", "model/", "optim/", "train/", "model_and_optim/", "__a/", "sub/"};

// '#' stands for a number, '$' for one of five digits.
constexpr std::string_view kNames[] = {".metadata",
                                       ".metadata.tmp",
                                       "__#.metadata",
                                       "__#.metadata",
                                       "__#_#.distcp",
                                       "__#_#_0a1b2c3d4e5f.distcp",
                                       "rank#.pt",
                                       "rank#.pt",
                                       "rank#.pt",
                                       "model.pt",
                                       "optim.pt",
                                       "train.pt",
                                       "other.pt",
                                       "model.safetensors",
                                       "optim.safetensors",
                                       "config.yaml",
                                       "metadata.yaml",
                                       "model.safetensors.index.json",
                                       "x.safetensors.index.json",
                                       "x.safetensors",
                                       ".safetensors",
                                       ".safetensors.index.json",
                                       "model-$-of-$.safetensors",
                                       "shard-$-model-$-of-$.safetensors",
                                       "pytorch_model.bin",
                                       "pytorch_model.bin.index.json",
                                       "x.bin.index.json",
                                       "model_world_size_#_rank_#.pt",
                                       "optim_world_size_#_rank_#.pt",
                                       "extra_state_world_size_#_rank_#.pt",
                                       "tessera-digests.json",
                                       "tessera-state.json",
                                       "tessera-0123456789abcdef.json",
                                       "model.safetensors.tessera.json",
                                       ".resume/lock",
                                       "step#/.metadata",
                                       "step#-unsharded",
                                       "latest",
                                       "a"};
constexpr std::string_view kNumbers[] = {"0",          "0",
                                         "1",          "1",
                                         "2",          "3",
                                         "",           "x",
                                         "00",         "-1",
                                         "+1",         " 1",
                                         "1048575",    "1048576",
                                         "7x",         "1_",
                                         "1.",         "\xd9\xa1",
                                         "2147483647", "2147483648",
                                         "4294967296", "99999999999999999999"};
constexpr std::string_view kFiveDigits[] = {"00001", "00001", "00002",  "00003", "00000",
                                            "99999", "-0001", "    1",  "1",     "",
                                            "x0001", "+0002", "000001", "1e3"};
constexpr std::string_view kTexts[] = {
    "",
    "{}",
    "[]",
    "world_size: 2147483647\n",
    "world_size: 1048576\n",
    "world_size: -1\n",
    "world_size: 2\n",
    "sharded_checkpointer: olmo_core\n",
    "{\"metadata\": {\"total_size\": -1}, \"weight_map\": {}}",
    "{\"weight_map\": {\"a\": \"../a\", \"b\": \"model.safetensors\"}}",
    "{\"weight_map\": {\"a\": \"model.safetensors.index.json\"}}",
    R"({"metadata": {"total_size": 8}, "weight_map": {"a": "model.pt", "b": "rank0.pt"}})",
    "\x80\x02}q\x00.",
    "not a checkpoint"};

// What is larger slows everything down and is of no kind that the others are not of.
constexpr std::uint64_t kLargest = 1 << 16;  // bytes of a file

class Draw {
 public:
  Draw(ByteView input, const std::vector<Files>& checkpoints)
      : random_(digest64(input)), checkpoints_(checkpoints) {}

  Entries directory();

 private:
  std::size_t below(std::size_t limit) { return static_cast<std::size_t>(random_() % limit); }
  template <typename List>
  const auto& one_of(const List& list) {
    return *std::next(std::begin(list), static_cast<std::ptrdiff_t>(below(std::size(list))));
  }

  void change() {
    const std::size_t kind = below(10);
    if (entries_.empty() || kind < 4) return put(name(), entry());
    const auto old =
        std::next(entries_.begin(), static_cast<std::ptrdiff_t>(below(entries_.size())));
    Entry moved = old->second;
    if (kind == 4) {
      entries_.erase(old);
    } else if (kind < 7) {
      if (kind == 5) entries_.erase(old);
      put(name(), std::move(moved));
    } else if (kind == 7) {
      old->second = entry();
    } else if (moved.kind == EntryKind::file) {
      old->second.content = damaged(*moved.content);
    }
  }

  // In the place of what has the name, and of files where the name needs directories.
  void put(const std::string& name, Entry entry) {
    for (std::size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
      const auto above = entries_.find(name.substr(0, at));
      if (above != entries_.end()) entries_.erase(above);
    }
    if (entry.kind != EntryKind::directory) {
      std::erase_if(entries_,
                    [&name](const auto& old) { return old.first.starts_with(name + "/"); });
    }
    entries_[name] = std::move(entry);
  }

  std::string name() {
    if (below(8) == 0) return std::string(one_of(one_of(checkpoints_)).first);
    std::string made(one_of(kFolders));
    if (!made.empty() && below(12) == 0) {
      made.pop_back();  // the folder itself
      return made;
    }
    for (const char c : one_of(kNames)) {
      if (c == '#') {
        made += one_of(kNumbers);
      } else if (c == '$') {
        made += one_of(kFiveDigits);
      } else {
        made += c;
      }
    }
    return made;
  }

  Entry entry() {
    switch (below(12)) {
      case 0:
        return {EntryKind::pipe};
      case 1:
        return {EntryKind::directory};
      case 2:
      case 3:
        return {EntryKind::link, {}, target()};
      default:
        return {EntryKind::file, content()};
    }
  }

  // Inside, outside, nowhere, to itself.
  std::string target() {
    switch (below(6)) {
      case 0:
        return "/etc/passwd";
      case 1:
        return "/dev/zero";
      case 2:
        return ".";
      case 3:
        return "../outside";
      default:
        return entries_.empty() || below(4) == 0 ? name() : std::string(one_of(entries_).first);
    }
  }

  FileBytes content() {
    const std::size_t kind = below(6);
    if (kind == 0) return text(one_of(kTexts));
    const FileBytes& found = one_of(one_of(checkpoints_)).second;
    return kind == 1 ? damaged(*found) : found;
  }

  static FileBytes text(std::string_view text) {
    const ByteView bytes = std::as_bytes(std::span(text.data(), text.size()));
    return std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
  }

  FileBytes damaged(const std::vector<std::byte>& clean) {
    auto bytes = std::make_shared<std::vector<std::byte>>(clean);
    if (bytes->empty()) return bytes;
    if (below(3) == 0) {
      bytes->resize(below(bytes->size()));
      return bytes;
    }
    for (std::size_t n = 1 + below(3); n > 0; --n)
      (*bytes)[below(bytes->size())] = std::byte(below(256));
    return bytes;
  }

  std::mt19937_64 random_;
  const std::vector<Files>& checkpoints_;
  Entries entries_;
};

Entries Draw::directory() {
  std::size_t changes = below(5);
  if (below(6) > 0) {
    for (const auto& [name, content] : one_of(checkpoints_))
      entries_[name] = {EntryKind::file, content};
  } else {
    changes = 1 + below(6);
  }
  for (; changes > 0; --changes) change();
  return std::move(entries_);
}

Files read_files(const fs::path& directory) {
  Files files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file() || entry.file_size() > kLargest) continue;
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    const ByteView bytes = std::as_bytes(std::span(text.data(), text.size()));
    files[fs::relative(entry.path(), directory).string()] =
        std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
  }
  return files;
}

[[noreturn]] void fail(const std::string& path) {
  throw std::system_error(errno, std::generic_category(), path);
}

void write_file(const std::string& path, const std::vector<std::byte>& bytes) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (fd < 0) fail(path);
  const bool written = ::write(fd, bytes.data(), bytes.size()) == std::ssize(bytes);
  ::close(fd);
  if (!written) fail(path);
}

void make(const std::string& path, const Entry& entry) {
  switch (entry.kind) {
    case EntryKind::file:
      return write_file(path, *entry.content);
    case EntryKind::link:
      if (::symlink(entry.target.c_str(), path.c_str()) != 0) fail(path);
      return;
    case EntryKind::pipe:
      if (::mkfifo(path.c_str(), 0666) != 0) fail(path);
      return;
    case EntryKind::directory:
      fs::create_directories(path);
  }
}

// Whether a file, link or pipe has the name of a folder of `name`: nothing can lie in it.
bool is_below_no_directory(const Entries& entries, const std::string& name) {
  for (std::size_t slash = name.find('/'); slash != std::string::npos;
       slash = name.find('/', slash + 1)) {
    const auto above = entries.find(name.substr(0, slash));
    if (above != entries.end() && above->second.kind != EntryKind::directory) return true;
  }
  return false;
}

}  // namespace

std::vector<Files> checkpoints_of_all_kinds(const std::string& golden, const std::string& scratch) {
  std::vector<Files> all;
  for (const char* name :
       {"checkpoints/c1", "checkpoints/c2", "checkpoints/hand", "checkpoints/qz",
        "checkpoints/fsdp1_uop0_ws2_local", "checkpoints/fsdp1_uop0_ws2_legacy",
        "checkpoints/ranks_fsdp1_ws2", "checkpoints/ranks_fsdp2_ws2", "checkpoints/c2_hf_cons",
        "c2_hf_cons", "c2_hf_cons/sharded", "c2_hf_dist"}) {
    all.push_back(read_files(golden + "/" + name));
  }
  const std::string olmo = golden + "/checkpoints/fsdp1_uop0_ws2_legacy";
  for (const CheckpointKind kind :
       {CheckpointKind::dcp, CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
        CheckpointKind::olmo_local, CheckpointKind::olmo_legacy}) {
    const std::string to = scratch + "/" + std::string(to_string(kind));
    ConvertOptions options;
    options.to = kind;
    convert(olmo, to, options);
    all.push_back(read_files(to));
  }
  const std::string set = scratch + "/set";
  ConvertOptions options;
  options.max_shard_size = 100;
  convert(olmo, set, options);
  all.push_back(read_files(set));
  fs::copy(golden + "/checkpoints/ranks_fsdp2_ws2", scratch + "/sealed",
           fs::copy_options::recursive);
  (void)seal(scratch + "/sealed");
  all.push_back(read_files(scratch + "/sealed"));
  const std::string parts = golden + "/variants/c2_nocoll";
  all.push_back(read_files(parts));
  std::erase_if(all, [](const Files& files) { return files.empty(); });
  return all;
}

Entries drawn_directory(ByteView input, const std::vector<Files>& checkpoints) {
  Entries entries = Draw(input, checkpoints).directory();
  // A later change may have made something else of a folder.
  std::erase_if(entries, [all = entries](const auto& entry) {
    return is_below_no_directory(all, entry.first);
  });
  return entries;
}

void write_entries(const std::string& directory, const Entries& entries) {
  for (const auto& [name, entry] : entries) {
    std::string path = directory;
    path.append("/").append(name);
    if (name.find('/') != std::string::npos) fs::create_directories(fs::path(path).parent_path());
    make(path, entry);
  }
}

std::shared_ptr<Store> in_memory(const Entries& entries) {
  std::shared_ptr<Store> store = memory_store();
  for (const auto& [name, entry] : entries) {
    if (entry.kind == EntryKind::file) tessera::put(*store, name, *entry.content, IfExists::fail);
  }
  return store;
}

}  // namespace tessera::fuzz
