// For tests of peers: a part, frames byte by byte, readers and servers without manners.
#pragma once

#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/digest.h"
#include "io/checked_source.h"
#include "storage/arena/peer.h"
#include "storage/arena/peer_wire.h"

namespace tessera::testing_support {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace)
using peer::FrameKind;
using peer::Packer;
using Bytes = std::vector<std::byte>;

inline constexpr std::chrono::milliseconds kSoon = 300ms;
inline constexpr std::size_t kLarge = 70'000'000;

inline Bytes content(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  std::mt19937_64 random(seed);
  for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof word, size - at));
  }
  return bytes;
}

inline Fd memory_of(const Bytes& bytes) {
  Fd memory(::memfd_create("peer-test", MFD_CLOEXEC));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t written = ::write(memory.get(), bytes.data() + done, bytes.size() - done);
    if (written < 0) throw std::runtime_error("no memory");
    done += static_cast<std::size_t>(written);
  }
  return memory;
}

// What a writer process has of rank 3.
struct Kept {
  explicit Kept(Bytes of_arena, std::uint64_t number = 1) : arena(std::move(of_arena)) {
    BlockDigests blocks;
    blocks.add(0, arena);
    Digests all = blocks.finish(arena.size());
    all.insert(all.begin(), digest64(tree));
    const auto raw = std::as_bytes(std::span(all));
    digests.assign(raw.begin(), raw.end());
    part.number = number;
    for (const auto& [ending, bytes] : {std::pair(".tree", &tree), std::pair(".arena", &arena),
                                        std::pair(".digests", &digests)}) {
      memory.push_back(memory_of(*bytes));
      part.objects.push_back(
          kept_object(std::string("rank3") + ending, memory.back(), bytes->size()));
    }
  }

  Bytes tree = content(12'345, 99), arena, digests;
  std::vector<Fd> memory;
  KeptPart part{.place = "/runs/a b/step9",
                .writer = "0123abcd",
                .rank = 3,
                .size = 4,
                .trainer = "host 7 9",
                .process = same_host::this_process()};
};

inline Bytes read_whole(const ByteSource& source) {
  Bytes bytes(source.size());
  source.read_at(0, bytes);
  return bytes;
}

inline Bytes read_memory(const KeptObject& object) {
  Bytes bytes(object.bytes);
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got =
        ::pread(object.fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got <= 0) throw std::runtime_error("the memory ends early");
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

inline void append(Bytes& to, const Bytes& more) {
  to.insert(to.end(), more.begin(), more.end());
}

inline Bytes frame(FrameKind kind, const Bytes& inside = {}) {
  Bytes bytes{static_cast<std::byte>(kind)};
  const auto size = static_cast<std::uint32_t>(inside.size());
  const auto* raw = reinterpret_cast<const std::byte*>(&size);
  bytes.insert(bytes.end(), raw, raw + sizeof size);
  append(bytes, inside);
  return bytes;
}

inline Bytes hello_frame(const std::string& token) {
  const std::string text = std::string(peer::kGreeting) + token;
  const auto raw = std::as_bytes(std::span(text));
  return frame(FrameKind::hello, {raw.begin(), raw.end()});
}

inline Bytes read_frame(const KeptPart& part, std::uint64_t offset, std::uint64_t size) {
  Packer packer;
  packer.text(part.writer).number(part.number).text("rank3.arena").number(offset).number(size);
  return frame(FrameKind::read, packer.bytes());
}

inline Bytes next_frame(const std::string& writer, std::uint64_t number) {
  return frame(FrameKind::next, Packer().text(writer).number(number).bytes());
}

// A connection without manners.
class RawReader {
 public:
  explicit RawReader(const PeerAddress& address) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const auto endpoint = peer::endpoint_of(address.host, address.port);
    const timeval patience{20, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (::connect(socket_.get(), endpoint->raw(), endpoint->size) != 0)
      throw std::runtime_error("no connection");
  }
  void send(const Bytes& bytes) const {
    (void)::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void end_sending() const { ::shutdown(socket_.get(), SHUT_WR); }
  // What comes until the other end has gone.
  [[nodiscard]] std::size_t drain() const {
    std::size_t all = 0;
    Bytes room(1U << 16U);
    while (true) {
      const ssize_t got = ::recv(socket_.get(), room.data(), room.size(), 0);
      if (got < 0 && errno == EAGAIN) throw std::runtime_error("the connection goes on");
      if (got <= 0) return all;
      all += static_cast<std::size_t>(got);
    }
  }

 private:
  Fd socket_;
};

// Answers the frames of each connection, other than signs, by these, one after another, up to the
// byte `cut`. Then it ends the connection.
class ScriptedServer {
 public:
  explicit ScriptedServer(std::vector<Bytes> answers, std::size_t cut = ~std::size_t{})
      : answers_(std::move(answers)), cut_(cut), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    auto endpoint = *peer::endpoint_of("127.0.0.1", 0);
    if (::bind(listener_.get(), endpoint.raw(), endpoint.size) != 0 ||
        ::listen(listener_.get(), 8) != 0 ||
        ::getsockname(listener_.get(), endpoint.raw(), &endpoint.size) != 0)
      throw std::runtime_error("no server on loopback");
    port_ = ntohs(reinterpret_cast<const sockaddr_in&>(endpoint.storage).sin_port);
    thread_ = std::thread([this] {
      while (true) {
        const Fd socket(::accept(listener_.get(), nullptr, nullptr));
        if (!socket) return;
        answer(socket.get());
      }
    });
  }
  ~ScriptedServer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  ScriptedServer(const ScriptedServer&) = delete;
  ScriptedServer& operator=(const ScriptedServer&) = delete;
  [[nodiscard]] PeerAddress address() const {
    return {"127.0.0.1", port_, std::string(peer::kTokenDigits, 'a')};
  }

 private:
  void answer(int socket) const {
    std::size_t sent = 0;
    for (std::size_t next = 0; next < answers_.size();) {
      std::array<std::byte, 5> head{};
      if (::recv(socket, head.data(), head.size(), MSG_WAITALL) != 5) return;
      std::uint32_t size = 0;
      std::memcpy(&size, head.data() + 1, sizeof size);
      Bytes inside(size);
      if (size > 0 && ::recv(socket, inside.data(), size, MSG_WAITALL) != ssize_t(size)) return;
      if (head[0] == static_cast<std::byte>(FrameKind::sign)) continue;
      const Bytes& all = answers_[next++];
      const std::size_t some = std::min(all.size(), cut_ - sent);
      (void)::send(socket, all.data(), some, MSG_NOSIGNAL);
      sent += some;
      if (sent >= cut_) return;
    }
  }

  const std::vector<Bytes> answers_;
  const std::size_t cut_;
  Fd listener_;
  std::uint16_t port_ = 0;
  std::thread thread_;
};

class Peer : public testing::Test {
 protected:
  void SetUp() override { ::setenv("TESSERA_ARENA_IFNAME", "lo", 1); }
  void TearDown() override {
    ::unsetenv("TESSERA_ARENA_IFNAME");
    ::unsetenv("GLOO_SOCKET_IFNAME");
  }
};

}  // namespace tessera::testing_support
