// Where in its program a rank is, in words, and what ranks are told that did different things.
//
// Beside the name of what a rank calls, which has to be equal on all ranks, travels where it is:
// "gather of 12 Float, unit 'h.2'" and "the forward of step 3". Only people read the latter.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "tessera/error.h"

namespace tessera {

// Of this thread, which is its rank's. Empty at first: nothing is known.
void set_whereabouts(std::string text);
[[nodiscard]] const std::string& whereabouts() noexcept;

// The bytes that a name with its whereabouts takes at most; the first kComparedBytes of a name
// count.
inline constexpr std::size_t kComparedBytes = 127, kCalledBytes = 255;
// What travels: the name and, when they are known, this thread's whereabouts.
[[nodiscard]] std::string called_here(std::string_view name);
// The name in what travelled.
[[nodiscard]] std::string_view compared_part(std::string_view called);
// The same for a person to read: "gather of 12 Float, unit 'h.2' (the forward of step 3)".
[[nodiscard]] std::string to_sentence(std::string_view called);

// `mismatch`: ranks `rank` and `peer` called different things; with the likely cause when one of
// them was in a training step.
[[nodiscard]] Error different_calls(int rank, std::string_view called, int peer,
                                    std::string_view peer_called);

}  // namespace tessera
