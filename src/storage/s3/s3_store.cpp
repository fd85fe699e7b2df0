#include "storage/s3/s3_store.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/parallel.h"
#include "base/process.h"
#include "storage/http/pieces.h"
#include "storage/s3/credentials.h"
#include "storage/s3/s3_sink.h"
#include "storage/s3/settings.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using s3::Bucket;
using s3::ObjectState;

class S3Source final : public FarSource {
 public:
  S3Source(std::shared_ptr<Bucket> bucket, std::string key, ObjectState version)
      : bucket_(std::move(bucket)),
        key_(std::move(key)),
        path_(bucket_->path_of(key_)),
        version_(std::move(version)) {}

  [[nodiscard]] std::uint64_t size() const override { return version_.size; }
  [[nodiscard]] const std::string& name() const override { return path_; }
  [[nodiscard]] std::string version() const override { return version_.version; }
  [[nodiscard]] std::string identity() const override {
    if (version_.etag.starts_with("W/")) return {};
    return bucket_->endpoint() + '\0' + path_ + '\0' + version_.etag + '\0' + version_.version;
  }
  [[nodiscard]] bool is_beside(const Bucket& bucket) const { return bucket_->is_beside(bucket); }
  [[nodiscard]] s3::CopiedObject copied() const { return bucket_->copied_object(key_, version_); }

 private:
  void read_piece(std::uint64_t offset, const Scattered& out) const override {
    bucket_->read(key_, version_, offset, out);
  }

  const std::shared_ptr<Bucket> bucket_;
  const std::string key_;
  const std::string path_;
  const ObjectState version_;
};

bool is_name(std::string_view name) {
  try {
    require_safe_name(name, {});
    return true;
  } catch (const Error&) {
    return false;
  }
}

using Time = std::chrono::system_clock::time_point;

// Text of a server; none: it says nothing, or nothing that is a time.
std::optional<Time> time_of(const std::string& text) {
  if (text.empty()) return std::nullopt;
  try {
    return s3::parse_time(text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

class S3Store final : public Store {
 public:
  S3Store(std::shared_ptr<Bucket> bucket, const std::string& prefix)
      : bucket_(std::move(bucket)),
        name_(prefix.empty() ? bucket_->name() : bucket_->path_of(prefix)),
        root_(prefix.empty() ? std::string() : prefix + "/") {}

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return listed(prefix, false);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return listed(prefix, true);
  }
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view prefix) const override {
    const std::string below = below_of(prefix);
    std::vector<std::string> found;
    bucket_->list(below, true, [&](const s3::Listing& page) {
      for (const std::string& directory : page.prefixes) {
        require_below(below, directory);
        std::string name = directory.substr(below.size());
        if (name.ends_with('/')) name.pop_back();
        if (is_name(name)) found.push_back(std::move(name));
      }
    });
    std::ranges::sort(found);
    return found;
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    return bucket_->head(key_of(name)).has_value();
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    std::string key = key_of(name);
    auto state = bucket_->head(key);
    if (!state) {
      throw Error(ErrorCode::not_found, "there is no such object").at_path(bucket_->path_of(key));
    }
    return std::make_shared<S3Source>(bucket_, std::move(key), std::move(*state));
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_listed(const ObjectInfo& object) const override {
    if (object.version.empty()) return open(object.name);
    ObjectState state{.size = object.size, .etag = object.version, .version = object.version};
    return std::make_shared<S3Source>(bucket_, key_of(object.name), std::move(state));
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    std::string key = key_of(name);
    s3::Condition condition{.is_absent = if_exists == IfExists::fail};
    condition.is_asked_first = condition.is_absent && keeps_others_out();
    if (condition.is_absent && !condition.is_asked_first) bucket_->require_absent(key);
    return s3_sink(bucket_, std::move(key), std::move(condition), size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    return s3_sink(bucket_, key_of(name), {.version = std::string(expected)}, size_hint);
  }
  StoreCopied copy(const StoreCopy& what) override {
    const auto* from = dynamic_cast<const S3Source*>(&what.from.original());
    if (from == nullptr || !from->is_beside(*bucket_)) return StoreCopied::cannot;
    return s3::copy_by_server(*bucket_, {.from = from->copied(),
                                         .size = from->size(),
                                         .to = key_of(what.name),
                                         .if_exists = what.if_exists,
                                         .copied = what.copied});
  }
  void remove(std::string_view name) override { bucket_->remove(key_of(name)); }
  [[nodiscard]] std::optional<std::vector<UnfinishedUpload>> uploads_begun_before(
      Time then, std::string_view name) const override {
    const std::string below = below_of(name);
    const std::string own = below.substr(0, below.empty() ? 0 : below.size() - 1);
    std::vector<UnfinishedUpload> found;
    for (const s3::ListedUpload& upload : bucket_->list_uploads(own)) {
      const auto begun = time_of(upload.initiated);
      const bool is_below = upload.key == own || upload.key.starts_with(below);
      if (is_below && begun && *begun < then) found.push_back(looked_at(upload, *begun));
    }
    return found;
  }
  void require_writable(std::string_view probe, bool is_only_writer) override {
    bucket_->once_around(root_, is_only_writer ? "write alone" : kTried,
                         [&] { s3::require_writable(*bucket_, key_of(probe), is_only_writer); });
  }

 private:
  static constexpr const char* kTried = "write";

  // Whether the server has shown that it refuses a PUT of an object that must not be there.
  [[nodiscard]] bool keeps_others_out() const {
    return bucket_->sends_conditions() && bucket_->has_done_around(root_, kTried);
  }

  [[nodiscard]] std::string key_of(std::string_view name) const {
    require_safe_name(name, name_);
    return root_ + std::string(name);
  }

  [[nodiscard]] UnfinishedUpload looked_at(const s3::ListedUpload& listed, Time begun) const {
    const s3::Upload upload{listed.key, listed.id};
    UnfinishedUpload seen{.path = bucket_->path_of(upload.key),
                          .last = begun,
                          .abort = [bucket = bucket_, upload] { bucket->abort(upload); }};
    for (const s3::ListedPart& part : bucket_->list_parts(upload)) {
      seen.is_ours = seen.is_ours || s3::is_mark(part);
      seen.bytes += part.size;
      seen.last = std::max(seen.last, time_of(part.modified).value_or(begun));
    }
    return seen;
  }

  // What keys in a directory begin with.
  [[nodiscard]] std::string below_of(std::string_view prefix) const {
    return prefix.empty() ? root_ : key_of(prefix) + "/";
  }
  void require_below(const std::string& below, const std::string& key) const {
    if (key.starts_with(below)) return;
    throw Error(ErrorCode::corrupt,
                "asked for keys below '" + below + "', the server lists '" + key + "'")
        .at_path(name_);
  }

  [[nodiscard]] std::vector<ObjectInfo> listed(std::string_view prefix, bool is_level) const {
    const std::string below = below_of(prefix);
    std::vector<ObjectInfo> found;
    bucket_->list(below, is_level, [&](const s3::Listing& page) {
      for (const s3::ListedObject& object : page.objects) {
        require_below(below, object.key);
        std::string name = object.key.substr(root_.size());
        if (!is_name(name)) continue;
        found.push_back({std::move(name), object.size, bucket_->listed_version(object),
                         time_of(object.modified)});
      }
    });
    // Servers promise the order of UTF-8 bytes, of which directory buckets know nothing.
    std::ranges::sort(found, {}, &ObjectInfo::name);
    return found;
  }

  const std::shared_ptr<Bucket> bucket_;
  const std::string name_;
  const std::string root_;  // of keys: empty, or ends with a slash
};

}  // namespace

namespace s3 {

namespace {

// What a bucket was made from. Its credentials come from the environment, too.
struct BucketKey {
  std::string name;
  Settings settings;
  std::shared_ptr<HttpClient> client;
  std::vector<std::string> variables;

  [[nodiscard]] bool operator==(const BucketKey&) const = default;
};

ShortMutex kept_mutex;
std::list<std::pair<BucketKey, std::shared_ptr<Bucket>>> kept;  // guarded by kept_mutex

std::vector<std::string> aws_variables() {
  const auto all = variables();  // a loop over a temporary would outlive it
  std::vector<std::string> found;
  for (const std::string& variable : *all)
    if (variable.starts_with("AWS_")) found.push_back(variable);
  return found;
}

}  // namespace

std::shared_ptr<Bucket> bucket_of(const Uri& url, std::shared_ptr<HttpClient> client) {
  constexpr std::size_t kMostKept = 16;
  Settings settings = settings_for(url);
  settings.prefix.clear();
  BucketKey key{url.scheme + "://" + settings.bucket, std::move(settings), std::move(client),
                aws_variables()};
  const std::lock_guard lock(kept_mutex);
  for (const auto& [made_from, bucket] : kept)
    if (made_from == key) return bucket;
  auto bucket = std::make_shared<Bucket>(key.name, key.settings, key.client);
  kept.emplace_front(std::move(key), bucket);
  if (kept.size() > kMostKept) kept.pop_back();
  return bucket;
}

}  // namespace s3

std::shared_ptr<Store> s3_store(const Uri& url, std::shared_ptr<HttpClient> client) {
  auto bucket = s3::bucket_of(url, std::move(client));
  return std::make_shared<S3Store>(std::move(bucket), s3::settings_for(url).prefix);
}

}  // namespace tessera

namespace tessera::s3 {
namespace {

class ProbeObject {
 public:
  ProbeObject(Bucket& bucket, const std::string& key) : bucket_(bucket), key_(key) {}
  ~ProbeObject() {
    if (!is_there_) return;
    try {
      bucket_.remove(key_);
    } catch (...) {  // the error on its way says more
    }
  }
  ProbeObject(const ProbeObject&) = delete;
  ProbeObject& operator=(const ProbeObject&) = delete;

  void write() {
    is_there_ = true;
    (void)bucket_.put(key_, {}, {}, random_uuid());
  }
  void remove() {
    bucket_.remove(key_);
    is_there_ = false;
  }

 private:
  Bucket& bucket_;
  const std::string& key_;
  bool is_there_ = false;
};

void require_conditions(Bucket& bucket, const std::string& key, bool is_only_writer) {
  const auto answer = bucket.unheeded_condition(key);
  if (!answer) return;
  if (is_only_writer) return bucket.send_no_conditions();
  const std::string why =
      "this server does not heed conditional writes (If-None-Match, If-Match): two savers could "
      "both "
      "be told that they have won. If nobody else writes here, say so: --single-writer, or "
      "single_writer of the options. It says: ";
  throw Error(ErrorCode::unsupported, why + *answer).at_path(bucket.name());
}

}  // namespace

void require_writable(Bucket& bucket, const std::string& key, bool is_only_writer) {
  ProbeObject probe(bucket, key);
  probe.write();
  require_conditions(bucket, key, is_only_writer);
  if (!bucket.head(key)) {
    throw Error(ErrorCode::io, "an object that was just written is not there")
        .at_path(bucket.path_of(key));
  }
  bucket.list(key, false, [](const Listing&) {});
  bucket.abort(bucket.create_upload(key, random_uuid(), PartsAre::sent));
  probe.remove();
}

namespace {

constexpr std::uint64_t kPart = 256 * kMiB;
constexpr int kCopiedAtOnce = 4;  // parts

std::string attempt_of(const CopiedObject& from) {
  const std::string text = from.bucket + '/' + from.key + '\n' + from.etag;
  return "copy-" + digest_text(digest64(std::as_bytes(std::span(text))));
}

bool is_there(Bucket& bucket, const ServerCopy& copy, const std::string& attempt) {
  const auto state = bucket.head(copy.to);
  return state && state->attempt == attempt && state->size == copy.size;
}

// An upload that is aborted unless it is completed.
class PartsCopy {
 public:
  PartsCopy(Bucket& bucket, const ServerCopy& copy, const std::string& attempt)
      : bucket_(bucket),
        copy_(copy),
        made_{copy.to, attempt, copy.size, copy.if_exists == IfExists::fail},
        upload_(bucket.create_upload(copy.to, attempt, PartsAre::copied)) {
    bucket.mark(upload_, PartsAre::copied);
  }
  ~PartsCopy() {
    if (is_over_) return;
    try {
      bucket_.abort(upload_);
    } catch (...) {  // found later among the unfinished uploads
    }
  }
  PartsCopy(const PartsCopy&) = delete;
  PartsCopy& operator=(const PartsCopy&) = delete;

  Written complete() {
    const std::uint64_t needed = (copy_.size + kMostParts - 1) / kMostParts;
    const std::uint64_t part = std::max(kPart, (needed + kMiB - 1) / kMiB * kMiB);
    std::vector<CompletedPart> parts((copy_.size + part - 1) / part);
    parallel_for(kCopiedAtOnce, parts.size(), [&](std::size_t i) {
      const std::uint64_t begin = i * part, end = std::min(begin + part, copy_.size);
      copy_.copied(0);  // hears a request to stop before the part is asked for
      parts[i] = bucket_.copy_part(upload_, static_cast<int>(i) + 1, copy_.from, begin, end);
      copy_.copied(end - begin);
    });
    const Condition condition{.is_absent = made_.is_new};
    const Written written = bucket_.complete(upload_, parts, condition, made_);
    is_over_ = written == Written::done || written == Written::gone;
    return written;
  }

 private:
  Bucket& bucket_;
  const ServerCopy& copy_;
  const Made made_;
  const Upload upload_;
  bool is_over_ = false;  // nothing is left to abort
};

}  // namespace

StoreCopied copy_by_server(Bucket& bucket, const ServerCopy& copy) {
  const bool is_conditional = copy.if_exists == IfExists::fail;
  if (is_conditional && copy.size <= kSmallestPart) return StoreCopied::cannot;
  const std::string attempt = attempt_of(copy.from);
  if (is_there(bucket, copy, attempt)) {
    copy.copied(copy.size);
    return StoreCopied::was_there;
  }
  copy.copied(0);
  if (!is_conditional && copy.size <= kPart) {
    bucket.copy(copy.from, {copy.to, attempt, copy.size});
    copy.copied(copy.size);
    return StoreCopied::done;
  }
  const Written written = PartsCopy(bucket, copy, attempt).complete();
  if (written == Written::done) return StoreCopied::done;
  if (written == Written::gone) {
    throw Error(ErrorCode::conflict, "somebody aborted the upload of this object")
        .at_path(bucket.path_of(copy.to));
  }
  throw Error(ErrorCode::already_exists, "the object is there already")
      .at_path(bucket.path_of(copy.to));
}

}  // namespace tessera::s3
