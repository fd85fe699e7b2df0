#include "storage/hub/hub_store.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "storage/http/pieces.h"
#include "storage/http/uri.h"
#include "storage/hub/hub_repo.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera::hub {
namespace {

class HubSource final : public FarSource {
 public:
  HubSource(std::shared_ptr<const HubRepo> repo, HubEntry file, std::string name)
      : repo_(std::move(repo)), file_(std::move(file)), name_(std::move(name)) {}

  [[nodiscard]] std::uint64_t size() const override { return file_.size; }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::string version() const override { return file_.content; }
  [[nodiscard]] std::string identity() const override { return repo_->identity_of(file_); }

 private:
  [[nodiscard]] int most_at_once() const override {
    return std::min(repo_->client().most_in_flight(), kReadAtOnce);
  }
  // A signature that has expired is refused in one way or another; the Hub knows whether it was
  // that. Null: it was refused.
  [[nodiscard]] std::optional<HttpResponse> read_from(const std::string& address,
                                                      std::uint64_t offset,
                                                      const Scattered& out) const {
    const auto make = [&](const std::string& url) {
      HttpRequest request = repo_->request("GET", url);
      request.headers.emplace_back("Range", range_text(offset, out.size()));
      request.into = out;
      return request;
    };
    HttpResponse response =
        asked_for(name_, [&] { return send_following(repo_->client(), address, make); });
    if (is_one_of(response.status, 400, 401, 403, 404, 410)) return std::nullopt;
    if (!is_one_of(response.status, 200, 206)) {
      throw Error(ErrorCode::io, "a read is answered with " + std::to_string(response.status))
          .at_path(name_)
          .while_doing("asking " + std::string(server_of(address)));
    }
    return response;
  }

  void read_piece(std::uint64_t offset, const Scattered& out) const override {
    std::string address;
    for (int addresses = 0; addresses < kMostAddresses; ++addresses) {
      address = fresh_address(address);
      const auto response = read_from(address, offset, out);
      if (response) return require_answer(*response, offset, out.size());
    }
    throw Error(ErrorCode::io,
                "the server that the Hugging Face Hub sends readers to refuses the"
                " address that the Hub has just given")
        .at_path(name_)
        .while_doing("asking " + std::string(server_of(address)));
  }

  // One that differs from `refused`: one thread asks for it, the others take that.
  [[nodiscard]] std::string fresh_address(const std::string& refused) const {
    const std::lock_guard lock(asking_);
    if (!address_.empty() && address_ != refused) return address_;
    std::string found = repo_->address_of(file_);
    const NoFork moment;
    address_ = std::move(found);
    return address_;
  }

  void require_answer(const HttpResponse& response, std::uint64_t offset, std::size_t size) const {
    if (response.status == 200 && offset == 0 && size == file_.size) return;
    const std::string found = response.header("content-range");
    if (response.status == 206 && is_range_of(found, offset, size, file_.size)) return;
    throw Error(ErrorCode::corrupt, "the server sent another range than " +
                                        range_text(offset, size) + " of " +
                                        std::to_string(file_.size))
        .at_path(name_)
        .at_offset(offset);
  }

  static constexpr int kMostAddresses = 3;  // of one read: the kept one, a new one, and once more

  const std::shared_ptr<const HubRepo> repo_;
  const HubEntry file_;
  const std::string name_;
  mutable SlowMutex asking_;
  mutable std::string address_;  // guarded by asking_; empty: not asked for yet
};

class HubStore final : public Store {
 public:
  HubStore(HubUrl url, HubAccess access, std::shared_ptr<HttpClient> client)
      : name_(to_string(url)),
        root_(url.path),
        repo_(std::make_shared<HubRepo>(std::move(url), std::move(access), std::move(client))) {
    if (!root_.empty()) require_safe_name(root_, name_);
  }

  [[nodiscard]] const std::string& name() const override { return name_; }

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return objects_of(repo_->tree(directory_of(prefix)));
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return objects_of(repo_->level(directory_of(prefix)));
  }
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view in) const override {
    const std::string directory = directory_of(in);
    const std::size_t below = directory.empty() ? 0 : directory.size() + 1;
    std::vector<std::string> found;
    for (const HubEntry& entry : repo_->level(directory))
      if (entry.is_directory) found.push_back(entry.path.substr(below));
    return found;
  }
  [[nodiscard]] bool exists(std::string_view name) const override { return find(name) != nullptr; }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const HubEntry* const file = find(name);
    if (file != nullptr) return std::make_shared<HubSource>(repo_, *file, at(name));
    throw Error(ErrorCode::not_found, "the Hugging Face Hub has no such file at this revision")
        .at_path(at(name));
  }

  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists /*if_exists*/,
                                                 std::uint64_t /*size_hint*/) override {
    refuse_to_write(at(name));
  }
  void remove(std::string_view name) override { refuse_to_write(at(name)); }
  [[nodiscard]] bool is_read_only() const override { return true; }
  void require_writable(std::string_view /*probe*/, bool /*is_only_writer*/) override {
    refuse_to_write(name_);
  }

 private:
  [[noreturn]] static void refuse_to_write(std::string path) {
    throw Error(
        ErrorCode::unsupported,
        "the Hugging Face Hub is read only: write to a disk, and upload that with hf upload")
        .at_path(std::move(path));
  }

  // How errors name an object.
  [[nodiscard]] std::string at(std::string_view name) const {
    require_safe_name(name, name_);
    return name_ + "/" + std::string(name);
  }
  // The path in the repository.
  [[nodiscard]] std::string path_of(std::string_view name) const {
    require_safe_name(name, name_);
    return (root_.empty() ? "" : root_ + "/") + std::string(name);
  }
  [[nodiscard]] std::string directory_of(std::string_view prefix) const {
    return prefix.empty() ? root_ : path_of(prefix);
  }

  // Null: there is no such file.
  [[nodiscard]] const HubEntry* find(std::string_view name) const {
    const std::string path = path_of(name);
    const std::size_t slash = path.rfind('/');
    const auto& level = repo_->level(path.substr(0, slash == std::string::npos ? 0 : slash));
    const auto found = std::ranges::lower_bound(level, path, {}, &HubEntry::path);
    const bool is_there = found != level.end() && found->path == path && !found->is_directory;
    return is_there ? &*found : nullptr;
  }

  [[nodiscard]] std::vector<ObjectInfo> objects_of(const std::vector<HubEntry>& entries) const {
    const std::size_t below = root_.empty() ? 0 : root_.size() + 1;
    std::vector<ObjectInfo> objects;
    for (const HubEntry& entry : entries)
      if (!entry.is_directory)
        objects.push_back({entry.path.substr(below), entry.size, entry.content});
    return objects;
  }

  const std::string name_;
  const std::string root_;  // in the repository; empty: all of it
  const std::shared_ptr<const HubRepo> repo_;
};

}  // namespace

std::shared_ptr<Store> hub_store(HubUrl url, std::shared_ptr<HttpClient> client) {
  return std::make_shared<HubStore>(std::move(url), hub_access(), std::move(client));
}

}  // namespace tessera::hub
