#include "storage/http/http_store.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>

#include "base/parallel.h"
#include "base/text.h"
#include "storage/http/pieces.h"
#include "storage/http/uri.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// What tells one version of an object from another. Empty: the server does not say.
struct Version {
  std::string etag, last_modified;

  // A strong ETag is about the bytes: W/"..." is about their meaning.
  [[nodiscard]] bool is_strong() const { return etag.starts_with('"'); }
};

Version version_of(const HttpResponse& response) {
  return {response.header("etag"), response.header("last-modified")};
}

std::optional<std::uint64_t> parse_size(std::string_view text) {
  std::uint64_t size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return size;
}

// "bytes 0-9/100": the text before the slash, and the size behind it, which may be unknown ("*").
struct ContentRange {
  std::string range;
  std::optional<std::uint64_t> size;
};

ContentRange content_range(const HttpResponse& response) {
  const std::string text = response.header("content-range");
  const std::size_t slash = std::min(text.find('/'), text.size());
  return {text.substr(0, slash), parse_size(text.substr(std::min(slash + 1, text.size())))};
}

// "3-9" of "bytes=3-9".
std::string span_text(std::uint64_t offset, std::uint64_t size) {
  return range_text(offset, size).substr(std::string_view("bytes=").size());
}

[[noreturn]] void refuse_as(ErrorCode code, const HttpRequest& request,
                            const HttpResponse& response) {
  throw Error(code, describe_in_words(request, response))
      .at_path(std::string(without_query(request.url)));
}
[[noreturn]] void refuse(const HttpRequest& request, const HttpResponse& response) {
  const bool is_absent = is_one_of(response.status, 404, 410);
  refuse_as(is_absent ? ErrorCode::not_found : ErrorCode::io, request, response);
}

class HttpSource final : public FarSource {
 public:
  HttpSource(std::shared_ptr<HttpClient> client, std::string url, std::uint64_t size,
             Version version)
      : client_(std::move(client)),
        url_(std::move(url)),
        name_(without_query(url_)),
        size_(size),
        version_(std::move(version)) {}

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::string version() const override {
    return version_.etag.empty() ? version_.last_modified : version_.etag;
  }

  // A time does not tell two versions of one second apart, a weak ETag not two of one meaning.
  [[nodiscard]] std::string identity() const override {
    return version_.is_strong() ? url_ + '\0' + version_.etag : std::string();
  }

 private:
  [[nodiscard]] int most_at_once() const override {
    return std::min(client_->most_in_flight(), kReadAtOnce);
  }
  void read_piece(std::uint64_t offset, const Scattered& out) const override {
    const auto make = [&](const std::string& url) {
      HttpRequest request{.url = url, .into = out};
      request.headers.emplace_back("Range", range_text(offset, out.size()));
      add_precondition(request);
      return request;
    };
    const HttpResponse response = send_following(*client_, url_, make);
    if (is_one_of(response.status, 412, 416)) refuse_replaced(offset);
    if (!is_one_of(response.status, 200, 206)) refuse(make(url_), response);
    require_same_version(response, offset);
    require_same_range(response, offset, out.size());
  }

  void add_precondition(HttpRequest& request) const {
    if (version_.is_strong()) {
      request.headers.emplace_back("If-Match", version_.etag);
    } else if (!version_.last_modified.empty()) {
      request.headers.emplace_back("If-Unmodified-Since", version_.last_modified);
    }
  }

  [[noreturn]] void refuse_replaced(std::uint64_t offset) const {
    throw Error(ErrorCode::conflict, "the object was replaced while it was read")
        .at_path(name_)
        .at_offset(offset);
  }

  // Not every server heeds preconditions. Mirrors of one object agree about its ETag but hardly
  // about its time, so that counts only without one.
  void require_same_version(const HttpResponse& response, std::uint64_t offset) const {
    const Version found = version_of(response);
    const bool is_same = version_.etag.empty() ? found.last_modified == version_.last_modified
                                               : found.etag == version_.etag;
    if (!is_same) refuse_replaced(offset);
  }

  void require_same_range(const HttpResponse& response, std::uint64_t offset,
                          std::uint64_t size) const {
    // As many bytes as were asked for: without a range they are the object's first.
    if (response.status == 200 && size == size_) return;
    const ContentRange found = content_range(response);
    if (response.status == 206 && found.range == "bytes " + span_text(offset, size)) {
      if (found.size && *found.size != size_) refuse_replaced(offset);
      return;
    }
    throw Error(ErrorCode::corrupt,
                response.status == 200
                    ? "the server sent the object's begin where a range was asked for"
                    : "the server sent another range than bytes " + span_text(offset, size))
        .at_path(name_)
        .at_offset(offset);
  }

  const std::shared_ptr<HttpClient> client_;
  const std::string url_;
  const std::string name_;
  const std::uint64_t size_;
  const Version version_;
};

class HttpStore final : public Store {
 public:
  HttpStore(Uri directory, std::shared_ptr<HttpClient> client, SpelledName spelled)
      : directory_(std::move(directory)), client_(std::move(client)), spelled_(std::move(spelled)) {
    while (directory_.path.ends_with('/')) directory_.path.pop_back();
    name_ = without_query(to_string(directory_));
  }

  [[nodiscard]] const std::string& name() const override { return name_; }

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view /*prefix*/) const override {
    throw Error(ErrorCode::unsupported,
                "a web server does not tell which objects there are: name"
                " a file, or use the store's own URL (s3://, gs://)")
        .at_path(name_);
  }

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    require_safe_name(name, name_);
    Uri object = directory_;
    object.path +=
        "/" + (name == spelled_.name ? spelled_.as_written : percent_encoded(name, true));
    const std::string url = to_string(object);
    if (auto source = open_by_head(url)) return source;
    return open_by_range(url, is_beside_signed(name));
  }

  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists /*if_exists*/,
                                                 std::uint64_t /*size_hint*/) override {
    refuse_writing(name);
  }
  void remove(std::string_view name) override { refuse_writing(name); }
  [[nodiscard]] bool is_read_only() const override { return true; }

 private:
  // A signature in a query is for one address: what it does not open is not there for us.
  [[nodiscard]] bool is_beside_signed(std::string_view name) const {
    return !directory_.query.empty() && !spelled_.name.empty() && name != spelled_.name;
  }

  [[noreturn]] void refuse_writing(std::string_view name) const {
    require_safe_name(name, name_);
    throw Error(ErrorCode::unsupported, "objects behind http are read only")
        .at_path(name_ + "/" + std::string(name));
  }

  [[nodiscard]] std::shared_ptr<ByteSource> opened(const std::string& url, std::uint64_t size,
                                                   const HttpResponse& response) const {
    return std::make_shared<HttpSource>(client_, url, size, version_of(response));
  }

  // Null: the server does not answer HEAD, or not with a size. URLs that are signed for GET are
  // 403.
  [[nodiscard]] std::shared_ptr<ByteSource> open_by_head(const std::string& url) const {
    const auto make = [](const std::string& target) {
      return HttpRequest{.method = "HEAD", .url = target};
    };
    const HttpResponse response = send_following(*client_, url, make);
    if (is_one_of(response.status, 403, 405, 501)) return nullptr;
    if (response.status != 200) refuse(make(url), response);
    const auto size = parse_size(response.header("content-length"));
    return size ? opened(url, *size, response) : nullptr;
  }

  // The size of all stands behind the range of the first byte.
  [[nodiscard]] std::shared_ptr<ByteSource> open_by_range(const std::string& url,
                                                          bool is_beside_signed) const {
    const auto make = [](const std::string& target) {
      return HttpRequest{.url = target, .headers = {{"Range", "bytes=0-0"}}, .most_body = 1};
    };
    try {
      const HttpResponse response = send_following(*client_, url, make);
      const auto size = content_range(response).size;
      const bool is_empty = response.status == 416 && size == 0;  // it has no first byte
      if ((response.status == 206 && size) || is_empty) return opened(url, *size, response);
      if (is_beside_signed && is_one_of(response.status, 400, 401, 403))
        refuse_as(ErrorCode::not_found, make(url), response);
      if (response.status >= 300) refuse(make(url), response);
      if (response.status == 200) return opened(url, response.body.size(), response);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::limit) throw;  // it sent the whole object
    }
    throw Error(ErrorCode::unsupported, "the server tells neither a size nor a range")
        .at_path(std::string(without_query(url)));
  }

  Uri directory_;
  std::string name_;
  const std::shared_ptr<HttpClient> client_;
  const SpelledName spelled_;
};

}  // namespace

std::shared_ptr<Store> http_store(const Uri& directory, std::shared_ptr<HttpClient> client,
                                  SpelledName spelled) {
  return std::make_shared<HttpStore>(directory, std::move(client), std::move(spelled));
}

}  // namespace tessera
