// What every function that takes a caller's tensor asks first: libtorch's own words for an
// undefined one say neither what is wrong nor whose mistake it is.
#pragma once

#include <torch/types.h>

#include "tessera/error.h"

namespace tessera {

inline void require_defined(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined())
    throw Error(ErrorCode::invalid_argument, "an undefined tensor").while_doing(operation);
}

}  // namespace tessera
