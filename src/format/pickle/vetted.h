// The names that were looked at: in Python they do nothing but build data, used in these ways.
#pragma once

#include <string_view>

#include "format/pickle/pickle.h"
#include "tessera/value.h"

namespace tessera::pickle {

// Whether the name was looked at. Dtypes and storage classes of torch are left to who knows them
// (format/torch): they are values.
[[nodiscard]] bool is_vetted(std::string_view module, std::string_view name);
// Whether a vetted name is a value, such as a layout, and no function or class.
[[nodiscard]] bool is_vetted_value(std::string_view module, std::string_view name);

// Whether this use of a vetted name was looked at too. What may do more than build data is a
// function or class among the arguments, in a state or among items (`callables`): there they are
// vetted only where a function has one by its nature, as the class of an array. `made_with`: what
// an object that is given a state was called with.
[[nodiscard]] bool is_vetted_use(std::string_view module, std::string_view name, Watch::Use use,
                                 const Value& arguments, bool callables,
                                 const Value& made_with = {});

// (text, "latin1"): what protocols below 3 write for bytes.
[[nodiscard]] bool is_latin1_text(const Value& arguments);

// Whether a call takes a pickle: its argument is to be scanned, and then decides.
[[nodiscard]] bool takes_pickle(std::string_view module, std::string_view name);

}  // namespace tessera::pickle
