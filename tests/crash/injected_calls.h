// Calls of the system, and allocations, that fail when they are told to, or at which something
// happens. injected_calls.cpp stands in the place of the system's functions, for the program that
// it is linked into.
#pragma once

#include <functional>

namespace tessera::testing {

// The calls that count; several of these together.
constexpr unsigned kOpenToRead = 1U << 0U;
constexpr unsigned kOpenToWrite = 1U << 1U;
constexpr unsigned kOpenDirectory = 1U << 2U;
constexpr unsigned kWrite = 1U << 3U;
constexpr unsigned kReserve = 1U << 4U;
constexpr unsigned kTruncate = 1U << 5U;
constexpr unsigned kSync = 1U << 6U;           // of a file
constexpr unsigned kSyncDirectory = 1U << 7U;  // of a directory
constexpr unsigned kClose = 1U << 8U;          // of a file that is open to write
constexpr unsigned kMakeDirectory = 1U << 9U;
constexpr unsigned kRename = 1U << 10U;
constexpr unsigned kLink = 1U << 11U;
constexpr unsigned kUnlink = 1U << 12U;
constexpr unsigned kRead = 1U << 13U;
constexpr unsigned kAllocate = 1U << 14U;
constexpr unsigned kOpenUnnamed = 1U << 15U;      // with O_TMPFILE
constexpr unsigned kRenameWithFlags = 1U << 16U;  // kRename are those without
constexpr int kCalls = 17;
constexpr unsigned kRenaming = kRename | kRenameWithFlags;
constexpr unsigned kNaming = kRenaming | kLink;
constexpr unsigned kOpening = kOpenToRead | kOpenToWrite | kOpenUnnamed | kOpenDirectory;
constexpr unsigned kAnyCall = (1U << kCalls) - 1U - kAllocate;

enum class Way {
  fails,            // with the error, and is not done
  fails_when_done,  // with the error, although it is done
  is_short,         // a write takes a few bytes
  is_idle,          // a write takes none
  act_before,       // the action comes first
  act_after,        // and here it comes afterwards
};

constexpr int kForever = 1 << 30;

struct Injection {
  unsigned calls = 0;  // of Call
  int at = 0;          // the first of these, counted from 1; 0: none
  int times = 1;       // this many from there on
  Way way = Way::fails;
  int error = 0;
  bool in_helpers = false;     // of other threads than the first alone
  bool at_commit = false;      // of those calls alone that give `commit_path` its name
  void (*action)() = nullptr;  // is not injected into
};

// The injector of this process. Nothing happens, and nothing is counted, unless `armed`.
struct Injector {
  Injection injection;
  std::function<void()> on_commit;  // when `commit_path` has got its name
  const char* commit_path = "";
  int seen = 0;              // calls that count
  int made[2][kCalls] = {};  // of each kind, by the first thread and by others
  int hit = 0;               // of them, those at which something happened
  char last[96] = "";        // the first of these
};

// Begins and ends. Between them no other thread changes the injector.
void arm(const Injector& injector);
Injector disarm();

}  // namespace tessera::testing
