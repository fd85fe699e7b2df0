#include "checkpoint/run/upload_source.h"

#include <algorithm>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/guard.h"
#include "checkpoint/open/belonging.h"
#include "checkpoint/save/leftovers.h"
#include "format/olmo/config.h"
#include "storage/near_objects.h"
#include "storage/sub_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kEnd = 4096;  // bytes

// Adds what a DCP directory says of its files, whose names have `prefix` before them.
void add_dcp(const std::shared_ptr<Store>& store, const std::string& prefix, KnownFiles& known) {
  std::vector<std::string> warnings;  // who opened the checkpoint has heard of them
  const dcp::Metadata metadata = read_dcp_metadata(*store);
  const DcpGuard guard = guard_dcp(store, metadata, warnings);
  NearObjects objects(*store);
  for (const std::string& name : named_files(metadata)) (void)objects.find(name);  // or its error
  for (const auto& [name, digests] : *guard.digests) known.digests[prefix + name] = digests;
  for (const std::string& name : known_leftovers(*store)) known.leftovers.insert(prefix + name);
}

void require_size(const ByteSource& source, const ObjectInfo& file) {
  if (source.size() == file.size) return;
  throw Error(ErrorCode::conflict, "the file has " + std::to_string(source.size()) +
                                       " bytes, it had " + std::to_string(file.size) +
                                       " when the upload began")
      .at_path(source.name());
}

}  // namespace

KnownFiles UploadSource::look() const {
  require_own_open(*store_);
  KnownFiles known;
  if (store_->exists(kDcpMetadata)) {
    add_dcp(store_, "", known);
    return known;
  }
  // Without a look at the sizes: other nodes may have the other files.
  if (store_->exists(kDirectorySideFile))
    known.digests = read_side_file(*store_, kDirectorySideFile).files;
  const std::string folder(olmo::kDcpFolder);
  const auto inner = std::make_shared<SubStore>(store_, folder);
  if (inner->exists(kDcpMetadata)) add_dcp(inner, folder + "/", known);
  return known;
}

std::shared_ptr<ByteSource> UploadSource::open(const UploadFile& file) const {
  auto source = store_->open(file.object.name);
  require_size(*source, file.object);
  return source;
}

std::shared_ptr<ByteSource> UploadSource::guarded(std::shared_ptr<ByteSource> source,
                                                  const UploadFile& file) {
  return file.digests ? guarded_source(std::move(source), *file.digests) : source;
}

std::vector<std::byte> UploadSource::end_of(const ObjectInfo& file) const {
  const auto source = store_->open(file.name);
  require_size(*source, file);
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(kEnd, file.size)));
  source->read_at(file.size - bytes.size(), bytes);
  return bytes;
}

}  // namespace tessera
