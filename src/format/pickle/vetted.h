// The names that were looked at: in Python they do nothing but build data, used in these ways.
#pragma once

#include <string_view>

#include "format/pickle/pickle.h"
#include "tessera/value.h"

namespace tessera::pickle {

// Whether the name was looked at. Dtypes and storage classes of torch are left to who knows them
// (format/torch): they are mentioned, nothing else.
[[nodiscard]] bool is_vetted(std::string_view module, std::string_view name);

// Whether this use of a vetted name was looked at too. Some are functions whose arguments decide:
// these have to be data. What _rebuild_from_type_v2 and _reconstructor call themselves is asked for
// here as well.
[[nodiscard]] bool is_vetted_use(std::string_view module, std::string_view name, Watch::Use use,
                                 const Value& arguments);

// Whether a call takes a pickle: its argument is to be scanned, and then decides.
[[nodiscard]] bool takes_pickle(std::string_view module, std::string_view name);

}  // namespace tessera::pickle
