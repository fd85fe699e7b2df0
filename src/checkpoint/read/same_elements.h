// Compares tensors bit for bit.
#pragma once

#include <string>

#include "tessera/value.h"

namespace tessera {

[[nodiscard]] bool same_form(const Tensor& a, const Tensor& b);  // shape and dtype

// Whether both have one shape, one dtype and the same bytes: by the checksums of their storages
// where these have one and the tensors lie in them alike, else by reading. `name` is for errors of
// reading.
[[nodiscard]] bool same_elements(const Tensor& a, const Tensor& b, const std::string& name);

}  // namespace tessera
