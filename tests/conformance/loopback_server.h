// A server on loopback whose answers a test writes byte by byte.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera {

// What happens behind the bytes of an answer. `trickle`: six blanks come, one every half a second.
enum class Then { keep, close, reset, stall, trickle };

struct Scripted {
  std::string bytes;
  Then then = Then::keep;
};

// An answer with its length.
inline std::string http_answer(int status, const std::string& body,
                               const std::string& headers = "") {
  return "HTTP/1.1 " + std::to_string(status) +
         " Text\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" + headers + "\r\n" +
         body;
}

// Each connection has a thread; requests are numbered from 1 on.
class LoopbackServer {
 public:
  using Script = std::function<Scripted(int number, const std::string& request)>;

  explicit LoopbackServer(Script script)
      : script_(std::move(script)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const raw = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, raw, size) != 0 || ::listen(listener_, 64) != 0 ||
        ::getsockname(listener_, raw, &size) != 0)
      throw std::runtime_error("no server on loopback");
    port_ = ntohs(address.sin_port);
    accepting_ = std::jthread([this](const std::stop_token& stop) { accept(stop); });
  }
  ~LoopbackServer() { stop(); }
  LoopbackServer(const LoopbackServer&) = delete;
  LoopbackServer& operator=(const LoopbackServer&) = delete;

  [[nodiscard]] std::string url(const std::string& path = "/") const {
    return "http://127.0.0.1:" + std::to_string(port_) + path;
  }
  // From here on connections are refused.
  void stop() {
    if (!accepting_.joinable()) return;
    accepting_.request_stop();
    accepting_.join();
    ::close(listener_);
    connections_.clear();
  }
  // The next connections are reset before a byte is read.
  void reset_next(int connections) { to_reset_ = connections; }
  [[nodiscard]] int accepted() const { return accepted_; }
  [[nodiscard]] int requests() const { return requests_; }
  [[nodiscard]] std::string request(int number) {
    const std::lock_guard lock(mutex_);
    return seen_.at(static_cast<std::size_t>(number) - 1);
  }

 private:
  // Closing it says so at once, and loses what is on the way.
  static void reset(int socket) {
    const linger now{1, 0};
    (void)::setsockopt(socket, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }

  static bool is_readable(int socket) {
    pollfd ready{socket, POLLIN, 0};
    return ::poll(&ready, 1, 20) == 1;
  }

  void accept(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      if (!is_readable(listener_)) continue;
      const int socket = ::accept(listener_, nullptr, nullptr);
      if (socket < 0) continue;
      ++accepted_;
      if (to_reset_ > 0) {
        --to_reset_;
        reset(socket);
        ::close(socket);
        continue;
      }
      connections_.emplace_back(
          [this, socket](const std::stop_token& ended) { serve(socket, ended); });
    }
  }

  // The head and the body; empty: the client has gone.
  static std::string next_request(int socket, const std::stop_token& stop) {
    std::string text;
    for (char window[1 << 16]; !stop.stop_requested();) {
      const std::size_t end = text.find("\r\n\r\n");
      if (end != std::string::npos) {
        const std::size_t mark = text.find("Content-Length: ");
        const std::size_t body =
            mark < end ? std::stoull(text.substr(mark + sizeof "Content-Length: " - 1)) : 0;
        if (text.size() >= end + 4 + body) return text;
      }
      if (!is_readable(socket)) continue;
      const ssize_t got = ::recv(socket, window, sizeof window, 0);
      if (got <= 0) return {};
      text.append(window, static_cast<std::size_t>(got));
    }
    return {};
  }

  void serve(int socket, const std::stop_token& stop) {
    while (true) {
      const std::string text = next_request(socket, stop);
      if (text.empty()) break;
      const int number = [&] {
        const std::lock_guard lock(mutex_);
        seen_.push_back(text);
        return ++requests_;
      }();
      const Scripted answer = script_(number, text);
      (void)::send(socket, answer.bytes.data(), answer.bytes.size(), MSG_NOSIGNAL);
      for (int blanks = 0; answer.then == Then::trickle && blanks < 6; ++blanks) {
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        (void)::send(socket, " ", 1, MSG_NOSIGNAL);
      }
      if (answer.then == Then::keep || answer.then == Then::trickle) continue;
      while (answer.then == Then::stall && !stop.stop_requested())
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (answer.then == Then::reset) reset(socket);
      break;
    }
    ::close(socket);
  }

  const Script script_;
  int listener_;
  int port_ = 0;
  std::mutex mutex_;
  std::vector<std::string> seen_;  // guarded by mutex_
  std::atomic<int> requests_{0}, accepted_{0}, to_reset_{0};
  std::vector<std::jthread> connections_;
  std::jthread accepting_;
};

}  // namespace tessera
