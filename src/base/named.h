// How an error tells of many ranks or files.
#pragma once

#include <cstddef>
#include <string>

namespace tessera {

// "rank 3 on HOST"
[[nodiscard]] inline std::string rank_on_host(int rank, const std::string& host) {
  return "rank " + std::to_string(rank) + (host.empty() ? "" : " on " + host);
}

// A list of which the first are named.
class Named {
 public:
  static constexpr std::size_t kMost = 16;
  void add(const std::string& text) {
    if (++count_ <= kMost) text_ += (count_ > 1 ? ", " : "") + text;
  }
  // Of those that nobody names.
  void add_unnamed(std::size_t count) { count_ += count; }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::string text() const {
    return count_ <= kMost ? text_ : text_ + " and " + std::to_string(count_ - kMost) + " more";
  }

 private:
  std::string text_;
  std::size_t count_ = 0;
};

}  // namespace tessera
