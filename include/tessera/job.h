// What long jobs (reads, loads, saves, conversions) take and report.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/error.h"

namespace [[gnu::visibility("default")]] tessera {

// Progress of long work. Working threads call the hook about ten times a second, one call at a
// time; the caller's own thread calls it when all is done. In a job of several ranks each rank
// hears of its own part. An exception that the hook throws ends the work.
struct Progress {
  std::uint64_t done = 0;   // bytes of tensors
  std::uint64_t total = 0;  // bytes; 0: not known yet
};
using ProgressHook = std::function<void(const Progress&)>;

// What a hook hears of each phase of a job on this rank, when it has ended or failed. The hook runs
// on the thread that called the job. What it throws is dropped: who listens does not end the work
// of all ranks.
struct Event {
  std::string_view job;    // "load", "save"
  std::string_view phase;  // of the job, as its options say; "all" is all of it and comes last
  int rank = 0;            // in the job's group
  std::uint64_t nanoseconds = 0;  // that the phase took, with the waiting for other ranks
  std::uint64_t bytes = 0;        // of tensors that this rank has read or written in it
  std::string checkpoint;         // where it is
  std::uint64_t id = 0;  // of the call: all its events have it, and no others of this process
  const Error* error = nullptr;  // why the phase failed, while the hook runs; null: it has ended
};
using EventHook = std::function<void(const Event&)>;

// `stop` in the options of a job ends it, from any thread. The job throws `cancelled` within a
// second or two. Reads of a store are cut; a request that makes something visible is waited for,
// and what is left to clean up is tried for some seconds. On several ranks one rank's token is
// enough: all of them throw. Then nothing has become visible; memory that a read was filling has
// undefined content, and a load leaves what any failure of it leaves. After the step that makes the
// result visible, a request to stop has no effect.

// Every `threads` must be from 1 to 1024; any other number is `invalid_argument`.

struct IoReport {
  std::uint64_t bytes_needed = 0;     // size of the elements that were asked for
  std::uint64_t bytes_read = 0;       // from the store, without metadata
  std::uint64_t bytes_unchecked = 0;  // read, but covered by no checksum
  std::uint64_t bytes_written = 0;
  // What the job sent to object stores and web servers.
  std::uint64_t requests = 0;
  std::uint64_t retries = 0;      // attempts beyond the first of a request
  std::uint64_t bytes_again = 0;  // that attempts moved in vain, both ways
};

}  // namespace tessera
