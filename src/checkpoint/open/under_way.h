// Saves of this process that go on while other threads of it work: who opens such a place waits.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>

#include "base/parallel.h"
#include "tessera/location.h"

namespace tessera {

// Says, while it lives, that a save to a place is under way until `decision`. What a child of
// fork() has of it says nothing.
class UnderWay {
 public:
  UnderWay(const Location& where, std::shared_ptr<const Decision> decision);
  ~UnderWay();
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  const std::uint64_t number_;  // of the entry
};

// What somebody is about to look at.
enum class Looks : std::uint8_t {
  at_place,  // a checkpoint, or an object in it
  at_run,    // checkpoints below a place
};

// What the name of a directory begins with in which writer processes of one save meet, beside its
// place. While they live, one of them has its lock.
inline constexpr std::string_view kMeetingStart = ".tessera-writer-";
// The name for save number `number` of the writers `id`, which is an attempt.
[[nodiscard]] std::string meeting_name(const std::string& id, std::uint64_t number);
[[nodiscard]] bool is_meeting_name(std::string_view name);
// Whether ranks that meet there call an object so: "up-1-2", or what has the failure of all.
[[nodiscard]] bool is_meeting_object(std::string_view name);
inline constexpr const char* kMeetingBroken = "broken";
// The object that has the trainer of the process with the lock, as same_host::to_text() has it.
inline constexpr const char* kMeetingTrainer = "trainer";

// Waits until no save is under way there. Looks::at_run waits on a disk, too, for writer processes
// whose trainer has ended, but for those that meet in `but` (a meeting_name()): for that of one
// that lives, as for any save of another process, nobody waits. Returns earlier once `stop`, or
// what HeedStop heeds, is requested: callers ask for it next. Threads that themselves work for such
// a save do not wait (ThreadJob::behind). Places are the same if their absolute paths are, links
// followed, or their URLs; of other stores if they are one Store.
void await_saves(const Location& where, Looks looks, const std::stop_token& stop = {},
                 const std::string& but = {});

}  // namespace tessera
