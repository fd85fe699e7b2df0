// For tests: boards, and ranks as threads or as processes that meet.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/same_host/meeting.h"

namespace tessera::same_host {

class MapBoard : public Board {
 public:
  void post(const std::string& key, const std::string& text) override {
    const std::lock_guard lock(mutex_);
    texts_[key] = text;
  }
  std::optional<std::string> read(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    const auto found = texts_.find(key);
    if (found == texts_.end()) return std::nullopt;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> texts_;
};

// A file a text, for processes.
class DirectoryBoard : public Board {
 public:
  explicit DirectoryBoard(std::filesystem::path directory) : directory_(std::move(directory)) {}
  void post(const std::string& key, const std::string& text) override {
    const auto path = path_of(key);
    std::ofstream(path.string() + ".new") << text;
    std::filesystem::rename(path.string() + ".new", path);
  }
  std::optional<std::string> read(const std::string& key) override {
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

// Runs `body` on threads that have met, and rethrows the first failure by rank.
inline void run_exchange(int ranks, const RingSize& ring,
                         const std::function<void(Exchange&)>& body) {
  MapBoard board;
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto meeting =
            meet(board, rank, ranks, {.deadline = std::chrono::seconds(10), .ring = ring});
        if (!meeting.exchange) throw Error(ErrorCode::unsupported, meeting.reason);
        body(*meeting.exchange);
      } catch (...) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

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

}  // namespace tessera::same_host
