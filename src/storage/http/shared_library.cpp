#include "storage/http/shared_library.h"

#include <dlfcn.h>

#include <mutex>
#include <string>
#include <utility>

#include "base/process.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string loader_says() {
  const char* text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

}  // namespace

SharedLibrary::SharedLibrary(std::string soname)
    : soname_(std::move(soname)),
      handle_(::dlopen(soname_.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) {
  if (handle_ != nullptr) return;
  throw Error(ErrorCode::unsupported,
              "URLs need the library " + soname_ + ", which does not load: " + loader_says());
}

void* SharedLibrary::address_of(const char* symbol) const {
  void* address = ::dlsym(handle_, symbol);
  if (address != nullptr) return address;
  throw Error(ErrorCode::unsupported,
              "the library " + soname_ + " has no function " + symbol + ": " + loader_says());
}

namespace {

// 7.87.0: the first whose TLS never raises SIGPIPE, which would end a training.
constexpr unsigned int kOldest = 0x075700;

CurlLibrary load() {
  const SharedLibrary file("libcurl.so.4");
  CurlLibrary curl;
  file.find("curl_version_info", curl.version_info);
  const curl_version_info_data* version = curl.version_info(CURLVERSION_NOW);
  if (version->version_num < kOldest) {
    throw Error(ErrorCode::unsupported, "URLs need libcurl 7.87 or newer, this is libcurl " +
                                            std::string(version->version));
  }
  file.find("curl_global_init", curl.global_init);
  file.find("curl_easy_init", curl.easy_init);
  file.find("curl_easy_cleanup", curl.easy_cleanup);
  file.find("curl_easy_reset", curl.easy_reset);
  file.find("curl_easy_setopt", curl.easy_setopt);
  file.find("curl_easy_perform", curl.easy_perform);
  file.find("curl_easy_strerror", curl.easy_strerror);
  file.find("curl_slist_append", curl.slist_append);
  file.find("curl_slist_free_all", curl.slist_free_all);
  if (curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
    throw Error(ErrorCode::unsupported, "libcurl does not start");
  return curl;
}

// Never destroyed: threads may outlive main().
PerProcess<CurlLibrary>& library = *new PerProcess<CurlLibrary>;
SlowMutex& loading = *new SlowMutex;  // libcurl starts in one thread

}  // namespace

const CurlLibrary& curl_library() {
  const std::lock_guard lock(loading);
  return library.get([] { return std::make_unique<CurlLibrary>(load()); });
}

}  // namespace tessera
