#include "storage/open_store.h"

#include <array>
#include <string_view>

#include "storage/names.h"
#include "tessera/error.h"
#include "tessera/prepare_store.h"
#ifdef TESSERA_REMOTE
#include "storage/http/client.h"
#include "storage/http/curl_library.h"
#include "storage/http/http_store.h"
#include "storage/http/uri.h"
#include "storage/s3/crypto_library.h"
#include "storage/s3/s3_store.h"
#endif

namespace tessera {
namespace {

constexpr std::string_view kFile = "file";

[[noreturn]] void refuse(const std::string& url, const std::string& why) {
  throw Error(ErrorCode::unsupported, why).at_path(url);
}

#ifdef TESSERA_REMOTE
using Open = std::shared_ptr<Store> (*)(const Uri& url, std::shared_ptr<HttpClient> client);
#else
using Open = std::nullptr_t;
#endif

struct Scheme {
  std::string_view name;
  Open open;
};

#ifdef TESSERA_REMOTE
std::shared_ptr<Store> open_s3(const Uri& url, std::shared_ptr<HttpClient> client) {
  return s3_store(url, std::move(client));
}
std::shared_ptr<Store> open_http(const Uri& url, std::shared_ptr<HttpClient> client) {
  return http_store(url, std::move(client));
}
constexpr std::array<Scheme, 6> kSchemes{{{"s3", open_s3},
                                          {"r2", open_s3},
                                          {"weka", open_s3},
                                          {"gs", open_s3},
                                          {"http", open_http},
                                          {"https", open_http}}};

// All stores of a process share its connections and its limit of requests.
std::shared_ptr<HttpClient> shared_client() {
  static const auto client = std::make_shared<HttpClient>();
  return client;
}

std::shared_ptr<Store> open_remote(const Scheme& scheme, const std::string& url) {
  return scheme.open(parse_uri(url), shared_client());
}

void prepare_remote(const Scheme& scheme) {
  (void)curl_library();
  if (scheme.open == open_s3) (void)s3::sha256({});
}
#else
void prepare_remote(const Scheme& /*scheme*/) {}

constexpr std::array<Scheme, 6> kSchemes{
    {{"s3", {}}, {"r2", {}}, {"weka", {}}, {"gs", {}}, {"http", {}}, {"https", {}}}};

std::shared_ptr<Store> open_remote(const Scheme& /*scheme*/, const std::string& url) {
  refuse(url, "object stores are not built in: configure with -DTESSERA_REMOTE=ON");
}
#endif

std::string known_schemes() {
  std::string names(kFile);
  for (const Scheme& scheme : kSchemes) names += ", " + std::string(scheme.name);
  return names;
}

}  // namespace

bool is_remote(const std::string& path) {
  const std::string_view scheme = scheme_of(path);
  return !scheme.empty() && scheme != kFile;
}

std::string without_file_scheme(const std::string& path) {
  if (scheme_of(path) != kFile) return path;
  std::string local = path.substr(kFile.size() + 3);
  constexpr std::string_view kHere = "localhost/";
  if (local.starts_with(kHere)) local.erase(0, kHere.size() - 1);
  if (!local.starts_with('/'))
    throw Error(ErrorCode::invalid_argument,
                "a file:// URL has three slashes and a path from the root on")
        .at_path(path);
  return local;
}

std::shared_ptr<Store> open_store(const std::string& path_or_url) {
  if (!is_remote(path_or_url)) return posix_store(without_file_scheme(path_or_url));
  const std::string_view name = scheme_of(path_or_url);
  for (const Scheme& scheme : kSchemes)
    if (scheme.name == name) return open_remote(scheme, path_or_url);
  if (name == "az" || name == "abfs" || name == "abfss") {
    refuse(path_or_url,
           "Azure has no interface of S3: copy the checkpoint to a disk with azcopy or rclone, or "
           "mount it with blobfuse2");
  }
  refuse(path_or_url,
         "no store is known for " + std::string(name) + "://; those that are: " + known_schemes());
}

void prepare_store(const std::string& path_or_url) {
  const std::string_view name = scheme_of(path_or_url);
  for (const Scheme& scheme : kSchemes)
    if (scheme.name == name) prepare_remote(scheme);
}

}  // namespace tessera
