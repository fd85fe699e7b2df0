// The code of the Error that a call throws.
#pragma once

#include <stdexcept>

#include "tessera/error.h"

namespace tessera {

template <typename F>
ErrorCode code_of(F&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  throw std::runtime_error("expected a tessera::Error");
}

}  // namespace tessera
