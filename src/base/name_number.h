// Numbers in names, such as those of files that have a rank in theirs. Anybody may have made the
// names.
#pragma once

#include <optional>
#include <string_view>

namespace tessera {

// Numbers in names are less, so that neither one more nor the product of two overflows.
inline constexpr int kNumberBound = 1 << 20;

// A number as programs write it: digits without zeros in front. None: the text is something else.
[[nodiscard]] std::optional<int> plain_number(std::string_view text);

// A number with zeros in front, as sets of files count; of one digit to six.
[[nodiscard]] std::optional<int> padded_number(std::string_view text);

// What stands between `prefix` and `suffix` in `name`, when it is a plain number.
[[nodiscard]] std::optional<int> number_between(std::string_view prefix, std::string_view name,
                                                std::string_view suffix);

}  // namespace tessera
