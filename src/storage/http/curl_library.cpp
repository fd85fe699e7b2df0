#include "storage/http/curl_library.h"

#include <mutex>
#include <string>

#include "base/fork.h"
#include "storage/http/shared_library.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// 7.87.0: the first whose TLS never raises SIGPIPE, which would end a training.
constexpr unsigned int kOldest = 0x075700;

CurlLibrary load() {
  const SharedLibrary library("libcurl.so.4");
  CurlLibrary curl;
  library.find("curl_version_info", curl.version_info);
  const curl_version_info_data* version = curl.version_info(CURLVERSION_NOW);
  if (version->version_num < kOldest) {
    throw Error(ErrorCode::unsupported, "URLs need libcurl 7.87 or newer, this is libcurl " +
                                            std::string(version->version));
  }
  library.find("curl_global_init", curl.global_init);
  library.find("curl_easy_init", curl.easy_init);
  library.find("curl_easy_cleanup", curl.easy_cleanup);
  library.find("curl_easy_reset", curl.easy_reset);
  library.find("curl_easy_setopt", curl.easy_setopt);
  library.find("curl_easy_perform", curl.easy_perform);
  library.find("curl_easy_strerror", curl.easy_strerror);
  library.find("curl_slist_append", curl.slist_append);
  library.find("curl_slist_free_all", curl.slist_free_all);
  if (curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
    throw Error(ErrorCode::unsupported, "libcurl does not start");
  return curl;
}

}  // namespace

const CurlLibrary& curl_library() {
  static auto& library =
      *new PerProcess<CurlLibrary>();       // never destroyed: threads may outlive main()
  static auto& loading = *new SlowMutex();  // libcurl starts in one thread
  const std::lock_guard lock(loading);
  return library.get([] { return std::make_unique<CurlLibrary>(load()); });
}

}  // namespace tessera
