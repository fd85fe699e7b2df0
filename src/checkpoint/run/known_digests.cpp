#include "checkpoint/run/known_digests.h"

#include <vector>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/guard.h"
#include "storage/sub_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::shared_ptr<Store> directory_of(const std::shared_ptr<Store>& store, const std::string& path) {
  return path.empty() ? store : std::make_shared<SubStore>(store, path);
}

bool has_same_metadata(const Store& store, const Store& cache) {
  if (!cache.exists(kDcpMetadata)) return false;
  const auto there = store.open(kDcpMetadata);
  const auto here = cache.open(kDcpMetadata);
  return there->size() == here->size() &&
         read_all(*there, kMetadataLimit) == read_all(*here, kMetadataLimit);
}

}  // namespace

// The nearest directory that has digests of the file counts.
CopyRule KnownDigests::rule_of(const std::string& name) {
  const std::lock_guard lock(mutex_);
  CopyRule rule;
  for (std::size_t slash = name.rfind('/');; slash = name.rfind('/', slash - 1)) {
    const bool is_root = slash == std::string::npos || slash == 0;
    const Directory& above = directory(is_root ? "" : name.substr(0, slash));
    if (!above.is_readable) return {.may_be_taken = false};
    const auto found = above.digests->find(is_root ? name : name.substr(slash + 1));
    if (found != above.digests->end()) return {true, found->second};
    if (above.has_other_metadata) rule.may_be_taken = false;
    if (is_root) return rule;
  }
}

const KnownDigests::Directory& KnownDigests::directory(const std::string& path) {
  const auto known = directories_.find(path);
  if (known != directories_.end()) return known->second;
  return directories_.emplace(path, look_into(path)).first->second;
}

KnownDigests::Directory KnownDigests::look_into(const std::string& path) const {
  Directory found{.digests = std::make_shared<DigestsByName>()};
  const auto store = directory_of(store_, path);
  try {
    if (store->exists(kDcpMetadata)) {
      std::vector<std::string> warnings;  // who opens the checkpoint hears of them
      found.digests = guard_dcp(store, read_dcp_metadata(*store), warnings).digests;
      found.has_other_metadata = !has_same_metadata(*store, *directory_of(cache_, path));
    } else if (path.empty() && store->exists(kDirectorySideFile)) {
      found.digests =
          std::make_shared<DigestsByName>(read_side_file(*store, kDirectorySideFile).files);
    }
  } catch (const Error&) {
    found.is_readable = false;
  }
  return found;
}

}  // namespace tessera
