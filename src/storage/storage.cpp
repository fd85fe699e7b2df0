#include "storage/storage.h"

#include <algorithm>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

bool is_plain(std::string_view part) {
  return !is_one_of(part, "", ".", "..") && part.find('\0') == std::string_view::npos;
}

bool is_safe_name(std::string_view name) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (!is_plain(name.substr(begin, end - begin))) return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace

void require_safe_name(std::string_view name, const std::string& store) {
  if (!is_safe_name(name)) {
    throw Error(ErrorCode::unsafe,
                "the object name '" + std::string(name) + "' is not a plain relative name")
        .at_path(store);
  }
}

std::shared_ptr<ByteSource> open_if_there(const Store& store, std::string_view name) {
  try {
    return store.open(name);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return nullptr;
  }
}

void put(Store& store, std::string_view name, ByteView bytes, IfExists if_exists) {
  const auto sink = store.create(name, if_exists, bytes.size());
  sink->write_at(0, bytes);
  sink->commit();
}

std::string_view scheme_of(std::string_view path) {
  constexpr std::string_view kCharacters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-";
  const std::size_t end = path.find_first_not_of(kCharacters);
  if (end == 0 || end == std::string_view::npos || path.substr(end, 3) != "://") return {};
  return path.substr(0, end);
}

bool is_web(std::string_view path) {
  return is_one_of(scheme_of(path), "http", "https");
}

namespace {

// Replaces a version by a look right before the commit.
class ReplacingSink final : public ByteSink {
 public:
  ReplacingSink(const Store& store, std::string_view name, std::string_view expected,
                std::unique_ptr<ByteSink> sink)
      : store_(store), object_(name), expected_(expected), sink_(std::move(sink)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override { sink_->write_at(offset, bytes); }
  void commit() override {
    const auto found = open_if_there(store_, object_);
    if (!found || found->version() != expected_) {
      throw Error(ErrorCode::conflict, "another writer has replaced or removed the object")
          .at_path(sink_->name());
    }
    sink_->commit();
  }
  [[nodiscard]] const std::string& name() const override { return sink_->name(); }

 private:
  const Store& store_;
  const std::string object_;
  const std::string expected_;
  const std::unique_ptr<ByteSink> sink_;
};

}  // namespace

bool Store::exists(std::string_view name) const {
  return open_if_there(*this, name) != nullptr;
}

std::vector<ObjectInfo> Store::list_level(std::string_view prefix) const {
  std::vector<ObjectInfo> found = list(prefix);
  const std::size_t below = prefix.empty() ? 0 : prefix.size() + 1;
  std::erase_if(found, [below](const ObjectInfo& object) {
    return object.name.find('/', below) != std::string::npos;
  });
  return found;
}

std::vector<std::string> Store::list_directories(std::string_view prefix) const {
  const std::size_t begin = prefix.empty() ? 0 : prefix.size() + 1;
  std::vector<std::string> found;
  for (const ObjectInfo& object : list(prefix)) {
    const std::size_t end = object.name.find('/', begin);
    if (end == std::string::npos) continue;
    std::string name = object.name.substr(begin, end - begin);
    if (found.empty() || found.back() != name) found.push_back(std::move(name));
  }
  std::ranges::sort(found);  // "a-/x" is listed before "a/x"
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::shared_ptr<ByteSource> Store::open_listed(const ObjectInfo& object) const {
  auto source = open(object.name);
  if (object.version.empty()) return source;
  const std::string version = source->version();
  if (version.empty() || version == object.version) return source;  // empty: it cannot tell
  throw Error(ErrorCode::conflict, "the object was replaced after it was listed")
      .at_path(source->name());
}

std::unique_ptr<ByteSink> Store::replace(std::string_view name, std::string_view expected,
                                         std::uint64_t size_hint) {
  return std::make_unique<ReplacingSink>(*this, name, expected,
                                         create(name, IfExists::replace, size_hint));
}

StoreCopied Store::copy(const StoreCopy& /*what*/) {
  return StoreCopied::cannot;
}

std::unique_ptr<ByteSink> Store::share(std::string_view name) {
  throw Error(ErrorCode::unsupported, "a store whose objects have one writer")
      .at_path(this->name() + "/" + std::string(name));
}

std::unique_ptr<NewDirectory> Store::new_directory(std::string_view name, IfExists /*if_exists*/) {
  throw Error(ErrorCode::unsupported, "a store in which no directory appears in one step")
      .at_path(this->name() + "/" + std::string(name));
}

void Store::require_writable(std::string_view /*probe*/, bool /*is_only_writer*/) {}

std::unique_ptr<StoreHold> Store::hold(std::string_view /*directory*/) {
  return nullptr;
}

std::optional<std::uint64_t> Store::free_bytes() const {
  return std::nullopt;
}

std::optional<std::vector<UnfinishedUpload>> Store::uploads_begun_before(
    std::chrono::system_clock::time_point /*then*/, std::string_view /*name*/) const {
  return std::nullopt;
}

std::string to_string(const Location& where) {
  // A web address may be signed, and what this returns is shown.
  if (!where.store && is_web(where.path)) return where.path.substr(0, where.path.find('?'));
  if (!where.store) return where.path;
  return where.name.empty() ? where.store->name() : where.store->name() + "/" + where.name;
}

namespace {

constexpr std::string_view kProbePrefix = "tessera-", kProbeSuffix = ".probe";

}  // namespace

std::string probe_name(const std::string& attempt) {
  return std::string(kProbePrefix) + attempt + std::string(kProbeSuffix);
}

bool is_probe_name(std::string_view name) {
  if (!name.starts_with(kProbePrefix) || !name.ends_with(kProbeSuffix)) return false;
  name.remove_prefix(kProbePrefix.size());
  name.remove_suffix(kProbeSuffix.size());
  return is_attempt(name);
}

bool is_remote(const std::string& path) {
  const std::string_view scheme = scheme_of(path);
  return !scheme.empty() && scheme != kFileScheme;
}

std::string without_file_scheme(const std::string& path) {
  if (scheme_of(path) != kFileScheme) return path;
  std::string local = path.substr(kFileScheme.size() + 3);
  constexpr std::string_view kHere = "localhost/";
  if (local.starts_with(kHere)) local.erase(0, kHere.size() - 1);
  if (!local.starts_with('/'))
    throw Error(ErrorCode::invalid_argument,
                "a file:// URL has three slashes and a path from the root on")
        .at_path(path);
  return local;
}

}  // namespace tessera
