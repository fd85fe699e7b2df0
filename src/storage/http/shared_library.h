// A library that is loaded when it is first needed, so that a command without a URL starts without
// it.
#pragma once

#include <string>

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

}  // namespace tessera
