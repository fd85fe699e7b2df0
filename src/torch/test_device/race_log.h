// RaceLog: which work on the streams of a device is ordered, and which of it touched the same
// memory without being so.
//
// Work is carried out at once here, so that numbers are right whatever the order is on a real
// device; what a real device might do is told from vector clocks. A line is a stream or the host of
// a device. Each kernel is a moment on its stream. It comes after all that its stream has begun,
// has waited for by events, and that the host knew to be over when it queued the kernel. Two
// moments of which none comes after the other may run at once: if one of them writes what the other
// touches, that is a race. All members may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing {

using Line = std::size_t;

// The number of each line's moments that come before.
class Clock {
 public:
  void join(const Clock& other);
  void advance(Line line, std::uint64_t to);
  [[nodiscard]] std::uint64_t at(Line line) const noexcept {
    return line < times_.size() ? times_[line] : 0;
  }

 private:
  std::vector<std::uint64_t> times_;
};

struct Moment {
  Line line = 0;
  std::uint64_t time = 0;
  std::string what = {};  // kernel and where the program was
};

class RaceLog {
 public:
  [[nodiscard]] Line add_line();
  [[nodiscard]] Clock clock(Line line) const;
  // What follows on `line` comes after all of `clock`.
  void join(Line line, const Clock& clock);
  // A kernel that `host` queues on `stream`.
  [[nodiscard]] Moment begin(Line stream, Line host, std::string what);

  // A block of memory that belongs to `stream`: whoever frees it lets later work on this stream
  // have it, and no other. So what the stream has begun may have had it before.
  void allocate(const void* first, std::size_t bytes, Line stream, Line host);
  // Nothing when it is no block.
  void free(const void* first, const std::string& where);
  // The kernel touches these bytes. Memory that is in no block is not looked at.
  void touch(const Moment& moment, const void* first, std::size_t bytes, bool writes);

  void report(std::string race);
  [[nodiscard]] std::vector<std::string> take_races();

 private:
  // Bytes [begin, end) of a block that the same moments touched.
  struct Span {
    std::uintptr_t begin, end;
    std::vector<Moment> writes = {};  // the last one
    std::vector<Moment> reads = {};   // since then, the last one of each line
  };
  struct Block {
    std::uintptr_t end;
    Line stream, host;
    std::vector<Span> spans;  // ascending, end to end
  };
  [[nodiscard]] Block* block_of(std::uintptr_t address);
  static void split(std::vector<Span>& spans, std::uintptr_t at);
  void touch(Span& span, const Moment& moment, const Clock& known, bool writes);
  void require_before(const std::vector<Moment>& earlier, const Clock& known,
                      const std::string& what);

  mutable std::mutex mutex_;
  std::vector<Clock> lines_;
  std::map<std::uintptr_t, Block> blocks_;
  std::vector<std::string> races_;
};

}  // namespace tessera::testing
