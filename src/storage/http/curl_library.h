// The functions of libcurl that we call, found when a URL first needs them.
#pragma once

#include <curl/curl.h>

namespace tessera {

struct CurlLibrary {
  decltype(curl_version_info)* version_info = nullptr;
  decltype(curl_global_init)* global_init = nullptr;
  decltype(curl_easy_init)* easy_init = nullptr;
  decltype(curl_easy_cleanup)* easy_cleanup = nullptr;
  decltype(curl_easy_reset)* easy_reset = nullptr;
  decltype(curl_easy_setopt)* easy_setopt = nullptr;
  decltype(curl_easy_perform)* easy_perform = nullptr;
  decltype(curl_easy_strerror)* easy_strerror = nullptr;
  decltype(curl_slist_append)* slist_append = nullptr;
  decltype(curl_slist_free_all)* slist_free_all = nullptr;
};

// Loads and initialises it at the first call; threads may call it at once. Throws `unsupported`
// where there is no libcurl, or one that is too old.
[[nodiscard]] const CurlLibrary& curl_library();

}  // namespace tessera
