// Rules that the names of objects obey in every store.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// Throws `unsafe` for a name that is empty, absolute, has an empty, "." or ".." part, or a NUL
// byte.
void require_safe_name(std::string_view name, const std::string& store);

}  // namespace tessera
