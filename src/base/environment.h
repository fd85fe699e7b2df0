// What the library knows of the environment. Nothing that Python calls asks getenv() or `environ`
// elsewhere: their memory moves when another thread sets a variable.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/environment.h"

namespace tessera {

// All of it, as "NAME=value", in the system's order.
using Variables = std::vector<std::string>;
[[nodiscard]] std::shared_ptr<const Variables> variables();

// The value of one; none: it is not set.
[[nodiscard]] std::optional<std::string> variable_of(const Variables& all, std::string_view name);
[[nodiscard]] std::optional<std::string> environment_variable(std::string_view name);

}  // namespace tessera
