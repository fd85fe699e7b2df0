// Ranks as forked processes, for programs in which one of them fails and the others are watched.
#pragma once

#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tessera::testing {

using Clock = std::chrono::steady_clock;

struct Child {
  pid_t process = 0;
  std::optional<int> status = {};  // as waitpid has it; none while it runs
};

// `count` objects in memory that this process shares with those that it forks from now on.
template <typename Object>
Object* shared_by_processes(std::size_t count = 1) {
  void* memory = ::mmap(nullptr, count * sizeof(Object), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return new (memory) Object[count];
}

// Rank r is a process that ends with `body(r)`.
inline std::vector<Child> fork_ranks(int world, const std::function<int(int rank)>& body) {
  std::vector<Child> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) ::_exit(body(rank));
    children.push_back({process});
  }
  return children;
}

// The system's choice: a port of ours could still be that of a connection that closed a minute ago.
inline int free_port() {
  const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (probe < 0 || ::bind(probe, any, size) != 0 || ::getsockname(probe, any, &size) != 0) {
    std::perror("no port");
    std::exit(2);
  }
  ::close(probe);
  return ntohs(address.sin_port);
}

// In a rank's process: what Mesh::from_environment() reads.
inline void set_environment(int rank, int world, int port) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(world).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
}

// Waits until all `children` but the one to leave out are over, or it is too late. One that has
// stopped itself goes on after `pause`, if there is one.
struct Waiting {
  Clock::time_point end;
  int without = -1;
  std::optional<std::chrono::milliseconds> pause = {};
};
inline void wait_for(std::vector<Child>& children, const Waiting& waiting) {
  const auto is_over = [&] {
    for (int rank = 0; rank < static_cast<int>(children.size()); ++rank)
      if (rank != waiting.without && !children[rank].status) return false;
    return true;
  };
  while (!is_over() && Clock::now() < waiting.end) {
    for (auto& child : children) {
      int status = 0;
      if (child.status || ::waitpid(child.process, &status, WNOHANG | WUNTRACED) <= 0) continue;
      if (!WIFSTOPPED(status)) {
        child.status = status;
      } else if (waiting.pause) {
        std::this_thread::sleep_for(*waiting.pause);
        ::kill(child.process, SIGCONT);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// As a scheduler ends a job, and waits until they have ended.
inline void kill_all(const std::vector<Child>& children) {
  for (const Child& child : children) ::kill(child.process, SIGKILL);
  for (const Child& child : children) ::waitpid(child.process, nullptr, 0);
}

// Ends those that still run. Says what is wrong; empty: nothing.
inline std::string end_all(std::vector<Child>& children,
                           const std::function<bool(int rank, int status)>& as_meant) {
  std::string wrong;
  for (int rank = 0; rank < static_cast<int>(children.size()); ++rank) {
    Child& child = children[rank];
    if (!child.status) {
      wrong += " rank " + std::to_string(rank) + " hangs;";
      ::kill(child.process, SIGKILL);
      ::waitpid(child.process, nullptr, 0);
    } else if (!as_meant(rank, *child.status)) {
      wrong += " rank " + std::to_string(rank) + " ended with status " +
               std::to_string(*child.status) + ";";
    }
  }
  return wrong;
}

// One of `children`, `fatal`, is killed or, if `is_stopped`, stops itself until all others are over
// and `meanwhile` has looked at what they have left. Says what is wrong; empty: nothing.
inline std::string end_with_fatal(
    std::vector<Child>& children, int fatal, bool is_stopped, Clock::time_point end,
    const std::function<void()>& meanwhile = [] {}) {
  wait_for(children, {.end = end, .without = is_stopped ? fatal : -1});
  meanwhile();
  if (is_stopped) {
    ::kill(children[static_cast<std::size_t>(fatal)].process, SIGCONT);
    wait_for(children, {.end = end});
  }
  return end_all(children, [&](int rank, int status) {
    const bool is_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    return status == 0 || (rank == fatal && !is_stopped && is_killed);
  });
}

// What killed ranks left is looked at by a process of its own, which may use a store. `wrong`:
// memory that processes share, for what `look` throws. Says what is wrong; empty: nothing.
template <std::size_t Size>
std::string looked_at_apart(char (&wrong)[Size], std::chrono::seconds limit,
                            const std::function<void()>& look) {
  wrong[0] = '\0';
  auto children = fork_ranks(1, [&](int) {
    try {
      look();
      return 0;
    } catch (const std::exception& error) {
      std::strncpy(wrong, error.what(), Size - 1);
      return 1;
    }
  });
  wait_for(children, {.end = Clock::now() + limit});
  const std::string ended = end_all(children, [](int, int status) { return status == 0; });
  return ended.empty() ? "" : " " + std::string(wrong) + ";" + ended;
}

// Draws numbers below its argument.
using Below = std::function<int(int count)>;

struct Outcome {
  std::string run;    // what it was
  std::string wrong;  // empty: nothing
};
// Draws runs and carries them out, one by one. Prints a line for each that goes wrong, and a
// summary. Returns their number.
inline int repeat(int runs, unsigned seed, const std::function<Outcome(const Below&)>& next) {
  std::mt19937 random(seed);
  const Below below = [&](int count) {
    return static_cast<int>(std::uniform_int_distribution<>(0, count - 1)(random));
  };
  int wrong = 0;
  double longest = 0;
  for (int i = 0; i < runs; ++i) {
    const auto begin = Clock::now();
    const Outcome outcome = next(below);
    longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
    if (outcome.wrong.empty()) continue;
    ++wrong;
    std::printf("%s:%s\n", outcome.run.c_str(), outcome.wrong.c_str());
    std::fflush(stdout);
  }
  std::printf("%d runs, %d wrong, the longest took %.1f s\n", runs, wrong, longest);
  return wrong;
}

}  // namespace tessera::testing
