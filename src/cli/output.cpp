#include "cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include <fmt/format.h>

namespace tessera::cli {

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

ProgressBar::ProgressBar(std::string what, const Common& common)
    : what_(std::move(what)), quiet_(common.quiet), terminal_(::isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

ProgressHook ProgressBar::hook() {
  if (quiet_) return {};
  return [this](const Progress& progress) { show(progress); };
}

void ProgressBar::show(const Progress& progress) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  const double share = progress.total == 0 ? 1.0
                                           : static_cast<double>(progress.done) /
                                                 static_cast<double>(progress.total);
  const double rate = seconds > 0 ? static_cast<double>(progress.done) / seconds : 0;
  const double left = share > 0 ? seconds / share - seconds : 0;
  const std::string text =
      fmt::format("{} of {}, {}/s, {:.0f} s left", human_bytes(progress.done),
                  human_bytes(progress.total), human_bytes(static_cast<std::uint64_t>(rate)), left);
  if (terminal_) {
    constexpr int kWidth = 30;
    const int filled = std::clamp(static_cast<int>(share * kWidth), 0, kWidth);
    const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                            std::string(static_cast<std::size_t>(kWidth - filled), '.');
    fmt::print(stderr, "\r\033[K{} [{}] {}", what_, bar, text);
    std::fflush(stderr);
    drawn_ = true;
  } else if (now - last_line_ > std::chrono::seconds(5)) {
    fmt::print(stderr, "{}: {}\n", what_, text);
    last_line_ = now;
  }
}

}  // namespace tessera::cli
