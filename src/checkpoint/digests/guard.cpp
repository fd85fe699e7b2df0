#include "checkpoint/digests/guard.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

#include "base/digest.h"
#include "checkpoint/open/open.h"
#include "checkpoint/save/leftovers.h"
#include "io/checked_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kSideFileLimit = std::uint64_t{1} << 30;  // bytes: 64 TB of data files
constexpr std::size_t kLongestSaveId = 64;                        // that goes into a file name

class GuardedStore final : public Store {
 public:
  GuardedStore(std::shared_ptr<Store> store, DigestsByName digests)
      : store_(std::move(store)), digests_(std::move(digests)) {}

  [[nodiscard]] const std::string& name() const override { return store_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return store_->list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return store_->list_level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override { return store_->exists(name); }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto source = store_->open(name);
    const auto found = digests_.find(std::string(name));
    // One whose directory's side file has its digests is not checked twice.
    if (found == digests_.end() || source->checked()) return source;
    return std::make_shared<CheckedSource>(std::move(source), found->second.blocks,
                                           found->second.origin);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return store_->create(name, if_exists, size_hint);
  }
  void remove(std::string_view name) override { store_->remove(name); }
  void remove_unfinished() override { store_->remove_unfinished(); }
  void sync() override { store_->sync(); }

 private:
  std::shared_ptr<Store> store_;
  DigestsByName digests_;
};

SideFile read_side_file(const Store& store, std::string_view name) {
  const auto source = store.open(name);
  try {
    const std::vector<std::byte> bytes = read_all(*source, kSideFileLimit);
    return decode_side_file({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
}

// The side file of another save: stale, or the sign of a `.metadata` that was changed.
void judge_other(const Store& store, const std::string& name, const dcp::Metadata& metadata,
                 std::vector<std::string>& warnings) {
  SideFile other;
  try {
    other = read_side_file(store, name);
  } catch (const Error& error) {
    warnings.push_back(std::string("ignored: ") + error.what());
    return;
  }
  for (const std::string& file : named_files(metadata)) {
    if (!is_attempt_name(file) || !other.files.contains(file)) continue;
    throw Error(
        ErrorCode::corrupt,
        fmt::format("the side file {} and .metadata both name {}, but are of different saves", name,
                    file))
        .at_path(store.name() + "/" + std::string(kDcpMetadata));
  }
  warnings.push_back("the side file " + name + " belongs to another save and is ignored");
}

}  // namespace

std::shared_ptr<Store> guarded_store(std::shared_ptr<Store> store,
                                     const std::vector<ObjectInfo>& objects,
                                     DigestsByName digests) {
  std::map<std::string_view, std::uint64_t> sizes;
  for (const ObjectInfo& object : objects) sizes.emplace(object.name, object.size);
  for (const auto& [name, file] : digests) {
    const auto found = sizes.find(name);
    const std::uint64_t size = found == sizes.end() ? 0 : found->second;
    if (found != sizes.end() && size == file.size) continue;
    throw Error(size < file.size ? ErrorCode::incomplete : ErrorCode::corrupt,
                "the file has " + std::to_string(size) + " bytes, its digests were made of " +
                    std::to_string(file.size))
        .at_path(store->name() + "/" + name);
  }
  return std::make_shared<GuardedStore>(std::move(store), std::move(digests));
}

std::string save_id_of(const Store& store, const dcp::Metadata& metadata) {
  const std::string& id = metadata.save_id;
  const bool plain = !id.empty() && id.size() <= kLongestSaveId &&
                     std::all_of(id.begin(), id.end(), [](unsigned char c) {
                       return c == '-' || (c < 0x80 && std::isalnum(c) != 0);
                     });
  if (plain) return id;
  return digest_text(digest64(read_all(*store.open(kDcpMetadata), kMetadataLimit)));
}

std::shared_ptr<Store> guard_dcp(std::shared_ptr<Store> store, const dcp::Metadata& metadata,
                                 std::vector<std::string>& warnings, std::string& types) {
  const std::vector<ObjectInfo> objects = store->list();
  const std::string id = save_id_of(*store, metadata);
  const std::string wanted = side_file_name(id);
  bool found = false;
  for (const ObjectInfo& object : objects) found = found || object.name == wanted;
  if (!found) {
    for (const ObjectInfo& object : objects) {
      if (is_side_file_name(object.name)) judge_other(*store, object.name, metadata, warnings);
    }
    return store;
  }
  SideFile side_file = read_side_file(*store, wanted);
  if (side_file.save_id != id) {
    throw Error(ErrorCode::corrupt, "the side file says that it is of another save")
        .at_path(store->name() + "/" + wanted);
  }
  types = std::move(side_file.types);
  auto guarded = guarded_store(store, objects, std::move(side_file.files));
  (void)read_all(*guarded->open(kDcpMetadata), kMetadataLimit);
  return guarded;
}

std::shared_ptr<Store> guard_directory(std::shared_ptr<Store> store) {
  if (!store->exists(kDirectorySideFile)) return store;
  DigestsByName digests = read_side_file(*store, kDirectorySideFile).files;
  const std::vector<ObjectInfo> objects = store->list();
  return guarded_store(std::move(store), objects, std::move(digests));
}

std::shared_ptr<Store> guard_file(std::shared_ptr<Store> store, const ObjectInfo& file) {
  const std::string side_file = file.name + std::string(kSideFileSuffix);
  if (!store->exists(side_file)) return store;
  DigestsByName digests = read_side_file(*store, side_file).files;
  if (digests.size() != 1 || !digests.contains(file.name)) {
    throw Error(ErrorCode::corrupt, "the side file is of another file")
        .at_path(store->name() + "/" + side_file);
  }
  return guarded_store(std::move(store), {file}, std::move(digests));
}

}  // namespace tessera
