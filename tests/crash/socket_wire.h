// Connections between forked ranks, for programs without libtorch.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/process.h"
#include "comm/edge.h"
#include "comm/tree_group.h"
#include "multirank/forked_ranks.h"
#include "tessera/comm.h"
#include "tessera/error.h"

namespace tessera::testing {

class SocketWire final : public Wire {
 public:
  explicit SocketWire(Fd socket) : socket_(std::move(socket)) {}

  void send(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) throw Error(ErrorCode::peer_failed, "the connection has ended");
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }

  void receive(std::span<std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) throw Error(ErrorCode::peer_failed, "the connection has ended");
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
  }

  void shut_down() noexcept override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  Fd socket_;
};

// Connections of rank 0 with each of the others: a tree of up to 33 ranks has no other connections.
// To be made before the fork; each process keeps its own ends, or none.
class Star {
 public:
  explicit Star(int ranks) {
    for (int rank = 1; rank < ranks; ++rank) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        std::perror("socketpair");
        std::exit(2);
      }
      pairs_.push_back({Fd(ends[0]), Fd(ends[1])});
    }
  }

  // In a rank's process; closes the others.
  [[nodiscard]] std::vector<std::unique_ptr<Wire>> wires_of(int rank) {
    std::vector<std::unique_ptr<Wire>> wires(pairs_.size() + 1);  // by peer
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const bool is_mine = rank == 0 || i + 1 == static_cast<std::size_t>(rank);
      if (!is_mine) continue;
      Fd& end = pairs_[i][rank == 0 ? 0 : 1];
      wires[rank == 0 ? i + 1 : 0] = std::make_unique<SocketWire>(std::move(end));
    }
    pairs_.clear();
    return wires;
  }

 private:
  std::vector<std::array<Fd, 2>> pairs_;
};

// Rank r of `ranks` is a process that ends with `body(group, r)`; `group` is that of all ranks.
inline std::vector<Child> fork_group(int ranks, const TreeOptions& options,
                                     std::chrono::milliseconds deadline,
                                     const std::function<int(Group& group, int rank)>& body) {
  Star star(ranks);
  return fork_ranks(ranks, [&](int rank) {
    auto wires = star.wires_of(rank);
    const auto group = make_tree_group(rank, ranks, options, deadline, [&](int peer) {
      return std::move(wires[static_cast<std::size_t>(peer)]);
    });
    return body(*group, rank);
  });
}

}  // namespace tessera::testing
