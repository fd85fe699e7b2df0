// A library that is loaded when it is first needed, so that a command without a URL starts without
// it.
#pragma once

#include <string>

#include <curl/curl.h>

namespace tessera {

// Never unloaded: libcurl and libcrypto clean up at the end of the process.
class SharedLibrary {
 public:
  // `soname`: "libcurl.so.4". Throws `unsupported` that names the library if it is not there.
  explicit SharedLibrary(std::string soname);

  // Sets `function` to the library's function of that name. Throws `unsupported` if it has none.
  template <typename Function>
  void find(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(address_of(symbol));
  }

 private:
  [[nodiscard]] void* address_of(const char* symbol) const;

  std::string soname_;
  void* handle_;
};

// The functions of libcurl that we call, found when a URL first needs them.

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
