#include "cli/output.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "value/render.h"

namespace tessera::cli {
namespace {

// The part of the work that is done, 0 to 1.
double share_of(const Progress& progress) {
  if (progress.total == 0) return 1;
  return static_cast<double>(progress.done) / static_cast<double>(progress.total);
}

// "40 s", "1 min 40 s", "2 h 5 min", "3 d 2 h".
std::string human_time(double seconds) {
  struct Unit {
    std::uint64_t seconds;
    const char* name;
  };
  constexpr std::array<Unit, 4> kUnits{{{86400, "d"}, {3600, "h"}, {60, "min"}, {1, "s"}}};
  const auto whole = static_cast<std::uint64_t>(std::llround(seconds));
  for (std::size_t i = 0; i + 1 < kUnits.size(); ++i) {
    if (whole < kUnits[i].seconds) continue;
    return fmt::format("{} {} {} {}", whole / kUnits[i].seconds, kUnits[i].name,
                       whole % kUnits[i].seconds / kUnits[i + 1].seconds, kUnits[i + 1].name);
  }
  return fmt::format("{} s", whole);
}

// The time left is told once enough is done to know it: a second of work, and a hundredth of all.
std::string text_of(const Progress& progress, double seconds) {
  const double share = share_of(progress);
  const double rate = seconds > 0 ? static_cast<double>(progress.done) / seconds : 0;
  std::string text =
      fmt::format("{} of {}, {}/s", human_bytes(progress.done), human_bytes(progress.total),
                  human_bytes(static_cast<std::uint64_t>(rate)));
  if (seconds >= 1 && share >= 0.01) text += ", " + human_time(seconds / share - seconds) + " left";
  return text;
}

// A terminal that can go back to the line's begin and clear it.
bool is_screen() {
  const char* name = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) == 1 && name != nullptr && std::string_view(name) != "dumb";
}

// Columns of the terminal; one that does not say has as many as it likes.
std::size_t columns() {
  winsize size{};
  const bool is_known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : 1000;
}

std::string drawn(double share) {
  constexpr int kBarWidth = 30;
  const int filled = std::clamp(static_cast<int>(share * kBarWidth), 0, kBarWidth);
  return std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(kBarWidth - filled), '.');
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

std::string and_inner(std::uint64_t tensors) {
  return tensors == 0 ? "" : fmt::format(" and {} inside of values", tensors);
}

void complain(const std::string& text) {
  std::fputs(("tessera: " + printable(text) + "\n").c_str(), stderr);
}

ProgressBar::ProgressBar(std::string what, const Common& common)
    : what_(std::move(what)), quiet_(common.quiet), screen_(is_screen()) {}

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
  if (screen_) {
    // One that is too long would go on in the next line, and stay there.
    std::string line = fmt::format("{} [{}] {}", what_, drawn(share_of(progress)), text);
    const std::size_t most = columns() - 1;
    if (line.size() > most) line = what_ + " " + text;
    std::fputs(("\r\033[K" + line.substr(0, most)).c_str(), stderr);
    std::fflush(stderr);
    drawn_ = true;
  } else if (now - last_line_ > std::chrono::seconds(5)) {
    std::fputs((what_ + ": " + text + "\n").c_str(), stderr);
    last_line_ = now;
  }
}

}  // namespace tessera::cli
