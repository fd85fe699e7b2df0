// The Error that a call throws, and its code.
#pragma once

#include <stdexcept>

#include "tessera/error.h"

namespace tessera {

template <typename F>
Error error_of(F&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("expected a tessera::Error");
}

template <typename F>
ErrorCode code_of(F&& call) {
  return tessera::error_of(call).code();
}

}  // namespace tessera
