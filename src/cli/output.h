// Text that people read: sizes, bars, and text from files made safe for a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "cli/commands.h"
#include "tessera/checkpoint.h"

namespace tessera::cli {

// "1.5 GiB"
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

// "1 file", "2 files"
[[nodiscard]] std::string counted(std::uint64_t number, std::string_view what);

// " and 7 inside of values", or nothing.
[[nodiscard]] std::string and_inner(std::uint64_t tensors);

// "tessera: TEXT" on standard error. Nobody has to be able to read it: what a command does and how
// it ends are the same without.
void complain(const std::string& text);

// A bar with bytes, rate and time left on a terminal that can draw it; a line every few seconds
// elsewhere; nothing with --quiet. Writes to standard error.
class ProgressBar {
 public:
  ProgressBar(std::string what, const Common& common);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  // The hook may be used while the bar lives.
  [[nodiscard]] ProgressHook hook();

 private:
  void show(const Progress& progress);

  using Clock = std::chrono::steady_clock;
  std::string what_;
  bool quiet_;
  bool screen_;
  bool drawn_ = false;  // a bar is on the screen
  Clock::time_point begin_ = Clock::now();
  Clock::time_point last_line_ = begin_;
};

}  // namespace tessera::cli
