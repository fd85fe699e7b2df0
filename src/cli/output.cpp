#include "cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include <fmt/format.h>

#include "value/render.h"

namespace tessera::cli {
namespace {

// The part of the work that is done, 0 to 1.
double share_of(const Progress& progress) {
  if (progress.total == 0) return 1;
  return static_cast<double>(progress.done) / static_cast<double>(progress.total);
}

std::string text_of(const Progress& progress, double seconds) {
  const double share = share_of(progress);
  const double rate = seconds > 0 ? static_cast<double>(progress.done) / seconds : 0;
  const double left = share > 0 ? seconds / share - seconds : 0;
  return fmt::format("{} of {}, {}/s, {:.0f} s left", human_bytes(progress.done),
                     human_bytes(progress.total), human_bytes(static_cast<std::uint64_t>(rate)),
                     left);
}

std::string drawn(double share) {
  constexpr int kWidth = 30;
  const int filled = std::clamp(static_cast<int>(share * kWidth), 0, kWidth);
  return std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(kWidth - filled), '.');
}

}  // namespace

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

std::string counted(std::uint64_t number, std::string_view what) {
  return fmt::format("{} {}{}", number, what, number == 1 ? "" : "s");
}

void complain(const std::string& text) {
  std::fputs(("tessera: " + printable(text) + "\n").c_str(), stderr);
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
  const std::string text = text_of(progress, seconds);
  if (terminal_) {
    std::fputs(fmt::format("\r\033[K{} [{}] {}", what_, drawn(share_of(progress)), text).c_str(),
               stderr);
    std::fflush(stderr);
    drawn_ = true;
  } else if (now - last_line_ > std::chrono::seconds(5)) {
    std::fputs((what_ + ": " + text + "\n").c_str(), stderr);
    last_line_ = now;
  }
}

}  // namespace tessera::cli
