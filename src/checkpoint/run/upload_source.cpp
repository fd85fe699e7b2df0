#include "checkpoint/run/upload_source.h"

#include <algorithm>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/guard.h"
#include "checkpoint/save/leftovers.h"
#include "storage/sub_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

const std::string kInner = "model_and_optim";
constexpr std::uint64_t kEnd = 4096;  // bytes

std::shared_ptr<Store> guarded_dcp(const std::shared_ptr<Store>& store) {
  std::vector<std::string> warnings;  // who opened the checkpoint has heard of them
  return guard_dcp(store, read_dcp_metadata(*store), warnings).store;
}

// Without a look at the sizes: other nodes may have the other files.
std::shared_ptr<Store> guarded_by_side_file(const std::shared_ptr<Store>& store) {
  if (!store->exists(kDirectorySideFile)) return store;
  SideFile side_file = read_side_file(*store, kDirectorySideFile);
  return guarded_store(store, std::make_shared<DigestsByName>(std::move(side_file.files)));
}

void require_size(const ByteSource& source, const ObjectInfo& file) {
  if (source.size() == file.size) return;
  throw Error(ErrorCode::conflict, "the file has " + std::to_string(source.size()) +
                                       " bytes, it had " + std::to_string(file.size) +
                                       " when the upload began")
      .at_path(source.name());
}

}  // namespace

UploadSource::UploadSource(std::shared_ptr<Store> store)
    : plain_(std::move(store)), store_(plain_) {
  files_ = store_->list();
  if (store_->exists(kDcpMetadata)) {
    drop_leftovers(*store_, "", files_);
    store_ = guarded_dcp(store_);
    return;
  }
  store_ = guarded_by_side_file(store_);
  auto inner = std::make_shared<SubStore>(store_, kInner);
  if (!inner->exists(kDcpMetadata)) return;
  drop_leftovers(*inner, kInner + "/", files_);
  inner_ = guarded_dcp(inner);
}

std::shared_ptr<ByteSource> UploadSource::open(const ObjectInfo& file) const {
  const std::string below = kInner + "/";
  const bool is_inner = inner_ && file.name.starts_with(below);
  auto source = is_inner ? inner_->open(file.name.substr(below.size())) : store_->open(file.name);
  require_size(*source, file);
  return source;
}

std::vector<std::byte> UploadSource::end_of(const ObjectInfo& file) const {
  const auto source = plain_->open(file.name);
  require_size(*source, file);
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(kEnd, file.size)));
  source->read_at(file.size - bytes.size(), bytes);
  return bytes;
}

}  // namespace tessera
