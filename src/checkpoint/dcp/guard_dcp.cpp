#include "checkpoint/dcp/guard_dcp.h"

#include <algorithm>
#include <cctype>
#include <optional>

#include <fmt/format.h>

#include "base/digest.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/guard.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestSaveId = 64;  // that goes into a file name

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
  const std::set<std::string> named = named_files(metadata);
  const auto shared = std::ranges::find_if(named, [&other](const std::string& file) {
    return is_attempt_name(file) && other.files.contains(file);
  });
  if (shared != named.end()) {
    throw Error(
        ErrorCode::corrupt,
        fmt::format("the side file {} and .metadata both name {}, but are of different saves", name,
                    *shared))
        .at_path(store.name() + "/" + std::string(kDcpMetadata));
  }
  warnings.push_back("the side file " + name + " belongs to another save and is ignored");
}

bool is_plain(unsigned char c) {
  return c == '-' || (c < 0x80 && std::isalnum(c) != 0);
}

// Conversions used to write a file for each rank without data. No reader needs one: it may be
// missing. A large `.metadata` has millions of names, so they are gathered where one is.
void forget_needless(DigestsByName& digests, NearObjects& objects, const dcp::Metadata& metadata) {
  std::optional<std::set<std::string>> named;
  std::erase_if(digests, [&](const auto& file) {
    const ObjectInfo* const there = objects.find(file.first);
    if (file.first == kDcpMetadata || (there != nullptr && there->size == file.second.size))
      return false;
    if (!named) named = named_files(metadata);
    return !named->contains(file.first);
  });
}

void add_named(const Store& store, const std::string& metadata, std::set<std::string>& own) {
  own.insert(metadata);
  own.merge(named_files(read_dcp_metadata(store, metadata)));
}

DcpGuard guard_by_side_file(std::shared_ptr<Store> store, const dcp::Metadata& metadata,
                            const std::string& id, std::vector<std::string>& warnings) {
  NearObjects objects(*store);
  const std::string wanted = side_file_name(id);
  if (objects.find(wanted) == nullptr) {
    for (const auto& [name, object] : objects.listed()) {
      if (is_side_file_name(name)) judge_other(*store, name, metadata, warnings);
    }
    return {std::move(store), std::make_shared<DigestsByName>()};
  }
  SideFile side_file = read_side_file(*store, wanted);
  if (side_file.save_id != id) {
    throw Error(ErrorCode::corrupt, "the side file says that it is of another save")
        .at_path(store->name() + "/" + wanted);
  }
  forget_needless(side_file.files, objects, metadata);
  require_sizes(side_file.files, objects, *store, true);
  const auto digests = std::make_shared<DigestsByName>(std::move(side_file.files));
  DcpGuard guard{guarded_store(std::move(store), digests), digests, std::move(side_file.types)};
  (void)read_all(*guard.store->open(kDcpMetadata), kMetadataLimit);
  return guard;
}

// What looks like damage may be the work of a save that has replaced the checkpoint meanwhile
// (fault-rows C04).
void require_not_replaced(const Store& store, const std::string& id) {
  std::string present = id;
  try {
    present = save_id_of(store, read_dcp_metadata(store));
  } catch (const Error&) {
    return;  // the first error says more
  }
  if (present == id) return;
  throw Error(ErrorCode::conflict, "the checkpoint was replaced while it was opened")
      .at_path(store.name());
}

}  // namespace

bool fits_file_name(const std::string& id) {
  return !id.empty() && id.size() <= kLongestSaveId && std::ranges::all_of(id, is_plain);
}

std::string save_id_of(const Store& store, const dcp::Metadata& metadata) {
  if (fits_file_name(metadata.save_id)) return metadata.save_id;
  return digest_text(digest64(read_all(*store.open(kDcpMetadata), kMetadataLimit)));
}

namespace {}  // namespace

// A store may know nothing of an object that it has listed (fault-rows O17). Who believes it takes
// all data of the checkpoint for leftovers.
std::set<std::string> own_files(const Store& store, const std::vector<ObjectInfo>& objects) {
  return own_files(store, objects, has_object(objects, kDcpMetadata) || store.exists(kDcpMetadata));
}

std::set<std::string> own_files(const Store& store, const std::vector<ObjectInfo>& objects,
                                bool has_metadata) {
  std::set<std::string> own;
  if (has_metadata) {
    const dcp::Metadata metadata = read_dcp_metadata(store);
    own = named_files(metadata);
    own.insert(std::string(kDcpMetadata));
    const std::string side_file = side_file_name(save_id_of(store, metadata));
    if (has_object(objects, side_file)) {
      own.insert(side_file);
      for (const auto& [name, digests] : read_side_file(store, side_file).files) own.insert(name);
    }
  }
  for (const ObjectInfo& object : objects) {
    if (is_rank_metadata(object.name)) add_named(store, object.name, own);
  }
  return own;
}

DcpGuard guard_dcp(const std::shared_ptr<Store>& store, const dcp::Metadata& metadata,
                   std::vector<std::string>& warnings) {
  const std::string id = save_id_of(*store, metadata);
  try {
    return guard_by_side_file(store, metadata, id, warnings);
  } catch (const Error&) {
    require_not_replaced(*store, id);
    throw;
  }
}

}  // namespace tessera
