#include "checkpoint/open/web_directory.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/parallel.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/side_file.h"
#include "checkpoint/open/indexed_set.h"
#include "format/safetensors/index.h"
#include "storage/forwarding_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kAskedAtOnce = 16;

// Lists files of known names.
class NamedStore final : public ForwardingStore {
 public:
  NamedStore(std::shared_ptr<Store> server, std::vector<std::string> names)
      : ForwardingStore(std::move(server)), names_(std::move(names)) {
    std::ranges::sort(names_);
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
  }

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    std::vector<ObjectInfo> found;
    const std::string below = prefix.empty() ? "" : std::string(prefix) + "/";
    for (const ObjectInfo& object : all())
      if (object.name.starts_with(below)) found.push_back(object);
    return found;
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    const std::size_t from = prefix.empty() ? 0 : prefix.size() + 1;
    std::vector<ObjectInfo> found = list(prefix);
    std::erase_if(found, [from](const ObjectInfo& object) {
      return object.name.find('/', from) != std::string::npos;
    });
    return found;
  }
  // Neither kind has any.
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view /*in*/) const override {
    return {};
  }

 private:
  // Once.
  const std::vector<ObjectInfo>& all() const {
    const std::lock_guard lock(mutex_);
    if (is_known_) return objects_;
    std::vector<ObjectInfo> asked(names_.size());
    parallel_for(kAskedAtOnce, names_.size(), [&](std::size_t i) {
      try {
        const auto source = inner().open(names_[i]);
        asked[i] = {names_[i], source->size(), source->version()};
      } catch (const Error& error) {
        if (error.code() != ErrorCode::not_found) throw;
      }
    });
    std::erase_if(asked, [](const ObjectInfo& object) { return object.name.empty(); });
    const NoFork moment;
    objects_ = std::move(asked);
    is_known_ = true;
    return objects_;
  }

  std::vector<std::string> names_;
  mutable SlowMutex mutex_;
  mutable bool is_known_ = false;            // guarded by mutex_
  mutable std::vector<ObjectInfo> objects_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> web_dcp_directory(std::shared_ptr<Store> server) {
  const dcp::Metadata metadata = read_dcp_metadata(*server);
  std::vector<std::string> names = {std::string(kDcpMetadata),
                                    side_file_name(save_id_of(*server, metadata))};
  for (const std::string& name : named_files(metadata)) names.push_back(name);
  return std::make_shared<NamedStore>(std::move(server), std::move(names));
}

std::shared_ptr<Store> web_set_directory(std::shared_ptr<Store> server, const std::string& index) {
  const auto text = read_all(*server->open(index), safetensors::kIndexLimit);
  std::vector<std::string> names = {index};
  for (const auto& [tensor, file] : safetensors::read_index(text).files) names.push_back(file);
  return std::make_shared<NamedStore>(std::move(server), std::move(names));
}

std::shared_ptr<Store> web_directory(const std::shared_ptr<Store>& server) {
  if (server->exists(kDcpMetadata)) return web_dcp_directory(server);
  for (const SetNames& set : {kSafetensorsSet, kTorchSet}) {
    const std::string index(set.usual_index);
    if (server->exists(index)) return web_set_directory(server, index);
  }
  return nullptr;
}

}  // namespace tessera
