// A server of a test that answers requests one behind the other as it is told, and keeps them.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.h"

namespace tessera {

class ScriptedServer {
 public:
  // Each answer goes whole to one connection, which is then closed; an empty one is none. kAttempt
  // in it becomes the attempt that the first request named.
  static constexpr std::string_view kAttempt = "$ATTEMPT";
  explicit ScriptedServer(std::vector<std::string> answers)
      : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), answers_(std::move(answers)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    if (::bind(listener_.get(), any, size) != 0 || ::listen(listener_.get(), 16) != 0 ||
        ::getsockname(listener_.get(), any, &size) != 0)
      throw std::runtime_error("no port for the server");
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    thread_ = std::jthread([this] { serve(); });
  }
  ~ScriptedServer() { (void)::shutdown(listener_.get(), SHUT_RDWR); }
  ScriptedServer(const ScriptedServer&) = delete;
  ScriptedServer& operator=(const ScriptedServer&) = delete;

  [[nodiscard]] const std::string& url() const { return url_; }
  // What came, heads and bodies. Nothing is answered any more, also where answers are left.
  [[nodiscard]] const std::vector<std::string>& requests() {
    (void)::shutdown(listener_.get(), SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    return requests_;
  }

 private:
  void serve() {
    for (const std::string& answer : answers_) {
      const Fd connection(::accept(listener_.get(), nullptr, nullptr));
      if (!connection) return;
      requests_.push_back(request_of(connection.get()));
      const std::string text = with_attempt(answer);
      (void)::send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL);
    }
  }
  [[nodiscard]] std::string with_attempt(std::string answer) const {
    const std::size_t at = answer.find(kAttempt);
    if (at == std::string::npos) return answer;
    const std::string name = "x-amz-meta-tessera-attempt: ";
    const std::string& first = requests_.front();
    const std::size_t begin = first.find(name) + name.size();
    return answer.replace(at, kAttempt.size(), first, begin, first.find("\r\n", begin) - begin);
  }
  static std::string request_of(int connection) {
    std::string text;
    char buffer[4096];
    while (!is_whole(text)) {
      const ssize_t got = ::recv(connection, buffer, sizeof(buffer), 0);
      if (got <= 0) break;
      text.append(buffer, static_cast<std::size_t>(got));
    }
    return text;
  }
  static bool is_whole(const std::string& text) {
    const std::size_t head = text.find("\r\n\r\n");
    if (head == std::string::npos) return false;
    const std::size_t length = text.find("Content-Length: ");
    if (length == std::string::npos || length > head) return true;
    return text.size() >= head + 4 + std::stoul(text.substr(length + 16));
  }

  const Fd listener_;
  const std::vector<std::string> answers_;
  std::string url_;
  std::vector<std::string> requests_;  // of thread_, until it ends
  std::jthread thread_;                // ends before what it uses
};

}  // namespace tessera
