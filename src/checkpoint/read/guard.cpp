#include "checkpoint/read/guard.h"

#include "checkpoint/read/tail.h"
#include "io/checked_source.h"
#include "storage/forwarding_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kSideFileLimit = std::uint64_t{1} << 30;  // bytes

class GuardedStore final : public ForwardingStore {
 public:
  GuardedStore(std::shared_ptr<Store> store, std::shared_ptr<const DigestsByName> digests)
      : ForwardingStore(std::move(store)), digests_(std::move(digests)) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto source = ForwardingStore::open(name);
    const auto found = digests_->find(std::string(name));
    // One whose directory's side file has its digests is not checked twice.
    if (found == digests_->end() || source->checked()) return source;
    return guarded_source(std::move(source), found->second);
  }
  [[nodiscard]] const DigestsByName& digests() const { return *digests_; }

 private:
  std::shared_ptr<const DigestsByName> digests_;
};

// `found`: the file in the store; null: it is missing.
void require_size(const std::string& name, const FileDigests& file, const ObjectInfo* found,
                  const Store& store) {
  if (found == nullptr) {
    throw Error(ErrorCode::incomplete, "the file is missing; it was there when digests were made")
        .at_path(store.name() + "/" + name);
  }
  const std::uint64_t size = found->size;
  if (size == file.size) return;
  throw Error(size < file.size ? ErrorCode::incomplete : ErrorCode::corrupt,
              "the file has " + std::to_string(size) + " bytes, its digests were made of " +
                  std::to_string(file.size))
      .at_path(store.name() + "/" + name);
}

}  // namespace

SideFile read_side_file(const Store& store, std::string_view name) {
  const auto source = store.open(name);
  try {
    const std::vector<std::byte> bytes = read_all(*source, kSideFileLimit);
    return decode_side_file({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
}

std::shared_ptr<ByteSource> guarded_source(std::shared_ptr<ByteSource> source,
                                           const FileDigests& digests) {
  if (digests.tail) return tailed_source(std::move(source), {digests.size, *digests.tail});
  return std::make_shared<CheckedSource>(std::move(source), digests.blocks, digests.origin);
}

std::shared_ptr<Store> guarded_store(std::shared_ptr<Store> store,
                                     std::shared_ptr<const DigestsByName> digests) {
  return std::make_shared<GuardedStore>(std::move(store), std::move(digests));
}

const FileDigests* digests_of(const Store& store, const std::string& name) {
  const auto* guarded = dynamic_cast<const GuardedStore*>(&store);
  if (guarded == nullptr) return nullptr;
  const auto found = guarded->digests().find(name);
  return found == guarded->digests().end() ? nullptr : &found->second;
}

void require_sizes(const DigestsByName& digests, NearObjects& objects, const Store& store,
                   bool may_lack) {
  for (const auto& [name, file] : digests) {
    const ObjectInfo* const found = objects.find(name);
    if (found != nullptr || !may_lack) require_size(name, file, found, store);
  }
}

std::vector<std::string> lacked_files(const Store& store, NearObjects& objects) {
  std::vector<std::string> names;
  const auto* guarded = dynamic_cast<const GuardedStore*>(&store);
  if (guarded == nullptr) return names;
  for (const auto& [name, file] : guarded->digests()) {
    if (objects.find(name) == nullptr) names.push_back(name);
  }
  return names;
}

std::shared_ptr<Store> guard_directory(std::shared_ptr<Store> store, bool may_lack) {
  if (!store->exists(kDirectorySideFile)) return store;
  DigestsByName digests = read_side_file(*store, kDirectorySideFile).files;
  NearObjects objects(*store);
  require_sizes(digests, objects, *store, may_lack);
  return guarded_store(std::move(store), std::make_shared<DigestsByName>(std::move(digests)));
}

std::shared_ptr<Store> guard_present(std::shared_ptr<Store> store) {
  if (!store->exists(kDirectorySideFile)) return store;
  DigestsByName digests = read_side_file(*store, kDirectorySideFile).files;
  return guarded_store(std::move(store), std::make_shared<DigestsByName>(std::move(digests)));
}

std::shared_ptr<Store> guard_file(std::shared_ptr<Store> store, const ObjectInfo& file) {
  const std::string side_file = file.name + std::string(kSideFileSuffix);
  if (!store->exists(side_file)) return store;
  DigestsByName digests = read_side_file(*store, side_file).files;
  if (digests.size() != 1 || !digests.contains(file.name)) {
    throw Error(ErrorCode::corrupt, "the side file is of another file")
        .at_path(store->name() + "/" + side_file);
  }
  require_size(file.name, digests.at(file.name), &file, *store);
  return guarded_store(std::move(store), std::make_shared<DigestsByName>(std::move(digests)));
}

}  // namespace tessera
