// For tests: ranks as processes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "base/parallel.h"

namespace tessera {

// Work that ends when it is stopped, and throws what then is to be thrown.
inline void until_stopped(const std::stop_token& stop) {
  while (!stop.stop_requested()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require_going_on(stop);
}

// Texts that processes leave for each other, a file each.
class DirectoryOfTexts {
 public:
  explicit DirectoryOfTexts(std::filesystem::path directory) : directory_(std::move(directory)) {}
  void post(const std::string& key, const std::string& text) {
    const auto path = path_of(key);
    std::ofstream(path.string() + ".new") << text;
    std::filesystem::rename(path.string() + ".new", path);
  }
  std::optional<std::string> read(const std::string& key) {
    std::ifstream file(path_of(key));
    if (!file) return std::nullopt;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    for (auto& c : key) c = c == '/' ? '.' : c;
    return directory_ / key;
  }
  std::filesystem::path directory_;
};

// A process that runs `body` and ends with what it returns. No exec: `body` sees this one's memory.
inline pid_t run_process(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  int code = 99;
  try {
    code = body();
  } catch (const std::exception&) {
    code = 98;
  }
  ::_exit(code);
}

// The exit code, or minus the signal that ended it.
inline int end_of(pid_t pid) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace tessera
