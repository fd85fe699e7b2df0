#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "base/process.h"
#include "base/text.h"
#include "storage/posix/spawn.h"
#include "storage/posix/system.h"
#include "storage/s3/credentials.h"
#include "storage/s3/providers.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostOutput = 1U << 20U;
// A process that has closed its output ends soon.
constexpr milliseconds kBetweenPolls{5};

bool is_blank(char c) {
  return is_one_of(c, ' ', '\t', '\n', '\r');
}

// Words as a shell would divide them, without anything else that a shell does.
std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  bool is_inside = false;
  char quote = '\0';
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote == '\0' && is_blank(c)) {
      is_inside = false;
      continue;
    }
    if (!is_inside) words.emplace_back();
    is_inside = true;
    const char next = i + 1 < line.size() ? line[i + 1] : '\0';
    if (c == quote) {
      quote = '\0';
    } else if (quote == '\0' && is_one_of(c, '"', '\'')) {
      quote = c;
    } else if (c == '\\' && next != '\0' &&
               (quote == '\0' || (quote == '"' && is_one_of(next, '"', '\\')))) {
      words.back() += next;
      ++i;
    } else {
      words.back() += c;
    }
  }
  if (quote == '\0') return words;
  throw Error(ErrorCode::invalid_argument, "a credential_process has a quote that is not closed");
}

int left_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::max<milliseconds::rep>(left, 0));
}

// The program that execvp() would find: it, and posix_spawnp(), would ask getenv() for PATH in the
// child, which has this process's memory.
std::string program_at(const std::string& word, const Variables& environment) {
  const std::string path = variable_of(environment, "PATH").value_or("/bin:/usr/bin");
  for (std::size_t begin = 0; word.find('/') == std::string::npos && begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    std::string program = end == begin ? "." : path.substr(begin, end - begin);
    program.append("/").append(word);
    std::error_code unknown;
    if (::access(program.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(program, unknown))
      return program;
    begin = end + 1;
  }
  return word;
}

// A process that does not outlive this object.
class Child {
 public:
  // Its output goes to `out`. Throws `io`.
  Child(const std::vector<std::string>& words, const Fd& out, const std::string& from) {
    SpawnOptions how;
    how.descriptors = {{out.get(), STDOUT_FILENO}};
    how.null = {STDIN_FILENO, STDERR_FILENO};
    if (spawn(id_, program_at(words.front(), *variables()), words, how) != 0)
      refuse_credentials(from, "it cannot be started");
  }
  ~Child() {
    if (is_over_) return;
    (void)::kill(id_, SIGKILL);
    (void)uninterrupted([&] { return ::waitpid(id_, nullptr, 0); });
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // What waitpid() tells of it; none: it runs beyond the deadline. 0 where the program that we are
  // part of does not want to know how its processes end.
  std::optional<int> status(Clock::time_point deadline) {
    while (true) {
      int status = 0;
      const pid_t ended = uninterrupted([&] { return ::waitpid(id_, &status, WNOHANG); });
      is_over_ = ended != 0;
      if (is_over_) return status;
      if (left_until(deadline) == 0) return std::nullopt;
      std::this_thread::sleep_for(kBetweenPolls);
    }
  }

 private:
  pid_t id_ = 0;
  bool is_over_ = false;
};

std::string read_until(const Fd& out, Clock::time_point deadline, const std::string& from) {
  std::string text;
  for (std::array<char, 4096> window{};;) {
    pollfd ready{out.get(), POLLIN, 0};
    const int events = ::poll(&ready, 1, left_until(deadline));
    if (events < 0 && errno == EINTR) continue;
    if (events == 0) refuse_credentials(from, "it takes too long");
    const ssize_t got =
        uninterrupted([&] { return ::read(out.get(), window.data(), window.size()); });
    if (got == 0) return text;
    if (got < 0) refuse_credentials(from, "its output cannot be read");
    text.append(window.data(), static_cast<std::size_t>(got));
    if (text.size() > kMostOutput) refuse_credentials(from, "it prints more than 1 MiB");
  }
}

std::string output_of(const std::vector<std::string>& words, milliseconds within,
                      const std::string& from) {
  const Clock::time_point deadline = Clock::now() + within;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno(errno, "make a pipe for", from);
  const Fd out(ends[0]);
  Fd in(ends[1]);
  Child child(words, in, from);
  { const Fd closed = std::move(in); }  // so that the output ends with the process
  std::string text = read_until(out, deadline, from);
  const auto status = child.status(deadline);
  if (!status) refuse_credentials(from, "it takes too long");
  if (*status != 0) {
    refuse_credentials(from, WIFEXITED(*status)
                                 ? "it failed with code " + std::to_string(WEXITSTATUS(*status))
                                 : "it was killed");
  }
  return text;
}

}  // namespace

Credentials of_process(const std::string& command, milliseconds within) {
  const std::vector<std::string> words = words_of(command);
  if (words.empty() || words[0].empty())
    throw Error(ErrorCode::invalid_argument, "a credential_process is empty");
  // Its arguments may have secrets.
  const std::string from = "credential_process " + words[0];
  const std::string text = output_of(words, within, from);
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("Version") || json["Version"] != 1)
    refuse_credentials(from, "the answer is no JSON object of version 1");
  return credentials_of_json(text, "SessionToken", from);
}

}  // namespace tessera::s3
