// Trainings drawn from seeds: sharded ones equal those of one process, and a rank that differs from
// the others ends in an error on all of them.
//   generated_training [pairs] COUNT FIRST_SEED [SECONDS]
// With `pairs`, every case has two of the features that people combine, and no rank differs.
// Each case runs in a process of its own, so that a crash or a hang is one failure among others.
// Prints each failure with its seed and the smallest case that still fails, and a summary; exits
// with 1 when a case failed. With SECONDS no case is begun after that time, and the last line says
// which seed comes next.
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "generated/run.h"
#include "tessera/library.h"

namespace {

using tessera::generated::Case;
using tessera::generated::Odd;
using tessera::generated::Verdict;
using Clock = std::chrono::steady_clock;

constexpr auto kCaseLimit = std::chrono::seconds(90);
constexpr auto kShrinkLimit = std::chrono::seconds(60);

std::string directory_of_run() {
  auto path = (std::filesystem::temp_directory_path() / "generated_training_XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr) std::abort();
  return path;
}

// In the forked process: writes the verdict, the failure first.
[[noreturn]] void answer(const Case& drawn, const std::string& directory, int to) {
  Verdict verdict;
  try {
    verdict = tessera::generated::verdict_of(drawn, directory);
  } catch (const std::exception& error) {
    verdict.failure = std::string("outside of all ranks: ") + error.what();
  }
  const auto text = verdict.failure + "\n" + verdict.note + "\n";
  const auto written = ::write(to, text.data(), text.size());
  ::_exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
}

// What the child writes until it ends; false: it takes too long.
bool read_all(int from, Clock::time_point end, std::string& text) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    pollfd wanted{.fd = from, .events = POLLIN, .revents = 0};
    if (left.count() <= 0 || ::poll(&wanted, 1, static_cast<int>(left.count())) <= 0) return false;
    char buffer[4096];
    const auto count = ::read(from, buffer, sizeof buffer);
    if (count <= 0) return true;
    text.append(buffer, static_cast<std::size_t>(count));
  }
}

Verdict carry_out(const Case& drawn) {
  const auto directory = directory_of_run();
  int ends[2];
  if (::pipe(ends) != 0) std::abort();
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    answer(drawn, directory, ends[1]);
  }
  ::close(ends[1]);
  std::string text;
  const bool in_time = read_all(ends[0], Clock::now() + kCaseLimit, text);
  ::close(ends[0]);
  if (!in_time) ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  std::filesystem::remove_all(directory);
  if (!in_time) return {"hangs", {}};
  if (WIFSIGNALED(status)) return {"ends by signal " + std::to_string(WTERMSIG(status)), {}};
  const auto middle = text.find('\n', 0);
  const auto note = text.rfind('\n', text.size() - 2);
  if (middle == std::string::npos || note == std::string::npos) return {"ends without a word", {}};
  return {text.substr(0, note), text.substr(note + 1, text.size() - note - 2)};
}

// Takes parts away while the case fails in whatever way.
Case shrink(Case drawn, std::string& failure) {
  const auto end = Clock::now() + kShrinkLimit;
  bool found = true;
  while (found && Clock::now() < end) {
    found = false;
    for (const auto& next : tessera::generated::smaller(drawn)) {
      if (Clock::now() > end) break;
      const auto verdict = carry_out(next);
      if (verdict.failure.empty()) continue;
      drawn = next;
      failure = verdict.failure;
      found = true;
      break;
    }
  }
  return drawn;
}

void report(const Case& drawn, std::string failure) {
  std::printf("FAILED %s\n  %s\n", tessera::generated::describe(drawn).c_str(), failure.c_str());
  std::fflush(stdout);
  const auto smallest = shrink(drawn, failure);
  std::printf(" smallest: %s\n  %s\n", tessera::generated::describe(smallest).c_str(),
              failure.c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const bool pairs = argc > 1 && std::strcmp(argv[1], "pairs") == 0;
  if (pairs) {
    ++argv;
    --argc;
  }
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: generated_training [pairs] COUNT FIRST_SEED [SECONDS]\n");
    return 2;
  }
  const auto count = std::strtoull(argv[1], nullptr, 10);
  const auto first = std::strtoull(argv[2], nullptr, 10);
  const auto end = Clock::now() + std::chrono::seconds(argc == 4 ? std::atoi(argv[3]) : 1'000'000);
  tessera::set_log([](tessera::LogLevel, std::string_view) {});  // what is drawn is odd on purpose
  std::uint64_t seed = first;
  int alike = 0, wrong = 0;
  std::map<std::string, int> notes;  // how cases ended in which one rank differs
  double longest = 0;
  for (; seed < first + count && Clock::now() < end; ++seed) {
    const auto drawn =
        pairs ? tessera::generated::draw_pair(seed) : tessera::generated::draw_with_more(seed);
    const auto begin = Clock::now();
    const auto verdict = carry_out(drawn);
    longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
    if (!verdict.failure.empty()) {
      ++wrong;
      report(drawn, verdict.failure);
    } else if (drawn.odd == Odd::nothing && verdict.note.empty()) {
      ++alike;
    } else {
      ++notes[verdict.note];
    }
  }
  std::printf(
      "%d trainings equal to one process, %d but for rounding, %d refused; a rank differs: %d "
      "errors, %d equal; %d wrong; the longest took %.1f s; next seed %llu\n",
      alike, notes["rounding"], notes["refused"], notes["error"], notes["equal"], wrong, longest,
      static_cast<unsigned long long>(seed));
  return wrong == 0 ? 0 : 1;
}
