// What a rank's collectives are for and where in its program it is, in words, and what ranks are
// told that did different things.
//
// The name of what a rank calls and its purpose have to be equal on all ranks: "gather of 12 Float,
// unit 'h.2'", "all_gather of 1 Long for a barrier". Beside them travels where the rank is: "the
// forward of step 3". Only people read that.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/error.h"

namespace tessera {

// What the collectives of this thread are for, while it lives: ranks whose purposes differ get
// `mismatch` and not each other's messages. Said with those around it, from the inside out: "a
// barrier in saving a checkpoint".
class [[nodiscard]] Purpose {
 public:
  explicit Purpose(std::string_view text);
  ~Purpose();
  Purpose(const Purpose&) = delete;
  Purpose& operator=(const Purpose&) = delete;

 private:
  std::string around_;
};
// The name and what it is for, when that was said.
[[nodiscard]] std::string with_purpose(std::string_view name);

// The whereabouts of this thread's rank. Empty at first: nothing is known.
void set_whereabouts(std::string text);
[[nodiscard]] std::string whereabouts();

// A thread that works for another one's rank shares its place, and what either sets both have:
// libtorch's engine runs backward on a device by a thread of its own.
class Place;
[[nodiscard]] std::shared_ptr<Place> place_of_thread();
void share_place(std::shared_ptr<Place> place);

// The bytes that a name with its whereabouts takes at most; the first kComparedBytes of a name
// and its purpose count.
inline constexpr std::size_t kComparedBytes = 127, kCalledBytes = 255;
// What travels: the name, what it is for and, when they are known, the whereabouts.
[[nodiscard]] std::string called_here(std::string_view name);
// The name and purpose in what travelled.
[[nodiscard]] std::string_view compared_part(std::string_view called);
// The same for a person to read: "gather of 12 Float, unit 'h.2' (the forward of step 3)".
[[nodiscard]] std::string to_sentence(std::string_view called);

// `mismatch`: ranks `rank` and `peer` called different things; with the likely cause when one of
// them was in a training step.
[[nodiscard]] Error different_calls(int rank, std::string_view called, int peer,
                                    std::string_view peer_called);

}  // namespace tessera
