// The one place where exceptions of libtorch's communication become Error.
#pragma once

#include <exception>
#include <functional>
#include <string_view>
#include <utility>

#include "tessera/error.h"

namespace tessera {

// To be called inside a catch block: throws `timeout` when the exception in flight says that a
// deadline passed and `peer_failed` for every other failure to talk. An Error goes on as it is.
[[noreturn]] void throw_communication_error(std::string_view operation);

// work(), with what it throws turned by the rule above.
template <typename Work>
decltype(auto) communicate(std::string_view operation, Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (...) {
    throw_communication_error(operation);
  }
}

// work(), which ends what is under way and nobody wants: of a failure, be it of memory, whoever
// needs the transport next is told.
template <typename Work>
void finish_unwanted(Work&& work) {
  try {
    std::forward<Work>(work)();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

}  // namespace tessera
