// Sleeping until a word that processes share changes. std::atomic::wait is for one process only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::same_host {

// Lives in shared memory; written by one rank, read by all.
using SharedWord = std::atomic<std::uint32_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == 4);

// Returns when the word is not `value` (perhaps at once), when somebody calls wake_all, after
// `at_most`, or for no reason: the caller looks again.
void sleep_while(SharedWord& word, std::uint32_t value, std::chrono::milliseconds at_most) noexcept;
void wake_all(SharedWord& word) noexcept;

}  // namespace tessera::same_host
