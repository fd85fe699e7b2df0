// For tests: boards, and ranks as threads that meet.
#pragma once

#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/testing.h"
#include "same_host/same_host.h"

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

// For processes.
class DirectoryBoard : public Board {
 public:
  explicit DirectoryBoard(std::filesystem::path directory) : texts_(std::move(directory)) {}
  void post(const std::string& key, const std::string& text) override { texts_.post(key, text); }
  std::optional<std::string> read(const std::string& key) override { return texts_.read(key); }

 private:
  DirectoryOfTexts texts_;
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

}  // namespace tessera::same_host
