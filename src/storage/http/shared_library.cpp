#include "storage/http/shared_library.h"

#include <dlfcn.h>

#include <utility>

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

}  // namespace tessera
