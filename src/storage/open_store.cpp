#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "storage/arena/arenas.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "tessera/stores.h"
#ifdef TESSERA_REMOTE
#include "base/process.h"
#include "storage/http/client.h"
#include "storage/http/http_store.h"
#include "storage/http/shared_library.h"
#include "storage/http/uri.h"
#include "storage/hub/hub_store.h"
#include "storage/hub/hub_url.h"
#include "storage/s3/s3_store.h"
#include "storage/s3/sigv4.h"
#endif

namespace tessera {
namespace {

constexpr std::string_view kHub = "hf";

constexpr std::string_view kArenaStart = "arena://";

enum class Which : std::uint8_t { itself, above };

[[noreturn]] void refuse(const std::string& url, const std::string& why) {
  throw Error(ErrorCode::unsupported, why).at_path(url.substr(0, url.find('?')));  // no signature
}

#ifdef TESSERA_REMOTE
using Client = std::shared_ptr<HttpClient>;
struct Scheme {
  std::string_view name;
  std::shared_ptr<Store> (*open)(const std::string& url, Client client);
  std::shared_ptr<Store> (*open_above)(const std::string& url, Client client);
};

// `path` without its last part, which is `last`.
struct Divided {
  std::string above, last;
};
Divided divided(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return {path, ""};
  return {path.substr(0, slash), path.substr(slash + 1)};
}

Uri parsed(const std::string& url) {
  return is_web(url) ? parse_uri(url) : parse_bucket_uri(url);
}

// What is no percent-encoding is a name as it is.
std::string decoded(const std::string& last) {
  try {
    return percent_decoded(last);
  } catch (const Error&) {
    return last;
  }
}

std::shared_ptr<Store> open_bucket(const std::string& url, Client client) {
  return s3_store(parsed(url), std::move(client));
}
std::shared_ptr<Store> open_in_bucket(const std::string& url, Client client) {
  Uri above = parsed(url);
  above.path = divided(above.path).above;
  return s3_store(above, std::move(client));
}
std::shared_ptr<Store> open_web(const std::string& url, Client client) {
  return http_store(parsed(url), std::move(client));
}
std::shared_ptr<Store> open_on_web(const std::string& url, Client client) {
  Uri above = parsed(url);
  const Divided path = divided(above.path);
  above.path = path.above;
  return http_store(above, std::move(client), {decoded(path.last), path.last});
}
std::shared_ptr<Store> open_on_hub(const std::string& url, Client client) {
  return hub::hub_store(hub::parse_hub_url(url), std::move(client));
}
std::shared_ptr<Store> open_above_on_hub(const std::string& url, Client client) {
  return hub::hub_store(hub::above(hub::parse_hub_url(url)), std::move(client));
}
constexpr std::array<Scheme, 7> kSchemes{{{"s3", open_bucket, open_in_bucket},
                                          {"r2", open_bucket, open_in_bucket},
                                          {"weka", open_bucket, open_in_bucket},
                                          {"gs", open_bucket, open_in_bucket},
                                          {kHub, open_on_hub, open_above_on_hub},
                                          {"http", open_web, open_on_web},
                                          {"https", open_web, open_on_web}}};

// All stores of a process share its connections and its limit of requests.
std::shared_ptr<HttpClient> shared_client() {
  const NoFork moment;  // a child that finds it half made would wait for it for ever
  static const auto client = std::make_shared<HttpClient>();
  return client;
}

std::shared_ptr<Store> open_remote(const Scheme& scheme, const std::string& url, Which which) {
  return (which == Which::itself ? scheme.open : scheme.open_above)(url, shared_client());
}

void prepare_remote(const Scheme& scheme) {
  (void)curl_library();
  if (scheme.open == open_bucket) (void)s3::sha256({});
}
#else
struct Scheme {
  std::string_view name;
};
constexpr std::array<Scheme, 7> kSchemes{
    {{"s3"}, {"r2"}, {"weka"}, {"gs"}, {kHub}, {"http"}, {"https"}}};

void prepare_remote(const Scheme& /*scheme*/) {}

std::shared_ptr<Store> open_remote(const Scheme& /*scheme*/, const std::string& url,
                                   Which /*which*/) {
  refuse(url, "object stores are not built in: configure with -DTESSERA_REMOTE=ON");
}
#endif

std::string known_schemes() {
  std::string names(kFileScheme);
  for (const Scheme& scheme : kSchemes) names += ", " + std::string(scheme.name);
  return names;
}

std::shared_ptr<Store> open_by_scheme(const std::string& url, Which which) {
  const std::string_view name = scheme_of(url);
  for (const Scheme& scheme : kSchemes)
    if (scheme.name == name) return open_remote(scheme, url, which);
  if (name == "az" || name == "abfs" || name == "abfss") {
    refuse(url,
           "Azure has no interface of S3: copy the checkpoint to a disk with azcopy or rclone, or "
           "mount it with blobfuse2");
  }
  refuse(url,
         "no store is known for " + std::string(name) + "://; those that are: " + known_schemes());
}

}  // namespace

std::shared_ptr<Store> open_store(const std::string& path_or_url) {
  if (!is_remote(path_or_url)) return posix_store(without_file_scheme(path_or_url));
  if (is_arena(path_or_url)) return arena_store(path_or_url.substr(kArenaStart.size()));
  return open_by_scheme(path_or_url, Which::itself);
}

bool is_read_only(std::string_view path) {
  return is_web(path) || scheme_of(path) == kHub || is_arena(path);
}

std::string last_name(const std::string& url) {
#ifdef TESSERA_REMOTE
  if (is_arena(url)) return {};
  if (scheme_of(url) == kHub) {
    const hub::HubUrl place = hub::parse_hub_url(url);
    return place.names_directory ? std::string() : place.path.substr(place.path.rfind('/') + 1);
  }
  const std::string last = divided(parsed(url).path).last;
  return is_web(url) ? decoded(last) : last;
#else
  return url.substr(url.rfind('/') + 1);
#endif
}

std::shared_ptr<Store> open_above(const std::string& url) {
  if (is_arena(url)) return arena_store(url.substr(kArenaStart.size()));
  return open_by_scheme(url, Which::above);
}

void prepare_store(const std::string& path_or_url) {
  const std::string_view name = scheme_of(path_or_url);
  for (const Scheme& scheme : kSchemes)
    if (scheme.name == name) prepare_remote(scheme);
}

}  // namespace tessera
