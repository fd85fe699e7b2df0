// One thread takes connections, and each of these has a thread. They share what is served, which
// changes under a mutex that nobody holds while it waits for a reader.
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <exception>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "storage/arena/peer.h"
#include "storage/arena/peer_wire.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using peer::Connection;
using peer::Endpoint;
using peer::FrameKind;

// Where a server listens.

struct Chosen {
  Fd listener;
  std::string host;
  std::string text;  // for the log
};

// None: nobody can listen there.
std::optional<Chosen> listening_at(const sockaddr& address, std::string text) {
  constexpr int kWaiting = 64;
  auto endpoint = peer::endpoint_of(peer::host_of(address), 0);
  if (!endpoint) return std::nullopt;
  Fd listener(::socket(address.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener || ::bind(listener.get(), endpoint->raw(), endpoint->size) != 0 ||
      ::listen(listener.get(), kWaiting) != 0)
    return std::nullopt;
  return Chosen{std::move(listener), peer::host_of(address), std::move(text)};
}

// Addresses that are valid on one link alone would need the number that the interface has on the
// reader's host.
bool is_for_others(const sockaddr& address) {
  if (address.sa_family == AF_INET) return true;
  return address.sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

// IPv4 first, as Gloo's users have it in most clusters.
Chosen listening_on_interface(const std::string& name, const std::string& variable) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) throw_errno(errno, "getifaddrs", name);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  const std::string text = name + " (" + variable + ")";
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
      if (at->ifa_name != name || at->ifa_addr == nullptr) continue;
      if (at->ifa_addr->sa_family != family || !is_for_others(*at->ifa_addr)) continue;
      if (auto chosen = listening_at(*at->ifa_addr, text)) return std::move(*chosen);
    }
  }
  throw Error(ErrorCode::not_found, "the interface '" + name + "' of " + variable +
                                        " is not there, or has no address for other hosts");
}

std::optional<Chosen> listening_by_host_name() {
  const std::string host = host_name();
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* all = nullptr;
  if (host.empty() || ::getaddrinfo(host.c_str(), nullptr, &wanted, &all) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(all, &::freeaddrinfo);
  for (const addrinfo* at = all; at != nullptr; at = at->ai_next) {
    if (!is_for_others(*at->ai_addr)) continue;
    if (auto chosen = listening_at(*at->ai_addr, "the address of the host's name " + host))
      return chosen;
  }
  return std::nullopt;
}

Chosen listening() {
  for (const std::string variable : {"TESSERA_ARENA_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    // Of several names, which Gloo allows, the first.
    const std::string value = environment_variable(variable).value_or("");
    const std::string name = value.substr(0, value.find(','));
    if (!name.empty()) return listening_on_interface(name, variable);
  }
  if (auto chosen = listening_by_host_name()) return std::move(*chosen);
  for (const char* const host : {"127.0.0.1", "::1"}) {
    const auto endpoint = peer::endpoint_of(host, 0);
    auto chosen = listening_at(*endpoint->raw(), "loopback: the host's name has no address");
    if (chosen) return std::move(*chosen);
  }
  throw Error(ErrorCode::io, "no address of this host can be listened at");
}

std::uint16_t port_of(const Fd& listener) {
  Endpoint own;
  own.size = sizeof own.storage;
  if (::getsockname(listener.get(), own.raw(), &own.size) != 0)
    throw_errno(errno, "getsockname", "a server of snapshots");
  const auto port = own.storage.ss_family == AF_INET
                        ? reinterpret_cast<const sockaddr_in&>(own.storage).sin_port
                        : reinterpret_cast<const sockaddr_in6&>(own.storage).sin6_port;
  return ntohs(port);
}

std::string random_token() {
  std::array<unsigned char, peer::kTokenDigits / 2> bytes{};
  const auto got = uninterrupted([&] { return ::getrandom(bytes.data(), bytes.size(), 0); });
  if (got != static_cast<ssize_t>(bytes.size()))
    throw_errno(errno, "getrandom", "a server of snapshots");
  std::string digits;
  for (const unsigned char byte : bytes) digits += fmt::format("{:02x}", byte);
  return digits;
}

// Takes as long whatever differs.
bool is_same_secret(ByteView left, std::string_view right) {
  if (left.size() != right.size()) return false;
  unsigned differs = 0;
  for (std::size_t i = 0; i < left.size(); ++i)
    differs |= std::to_integer<unsigned>(left[i]) ^ static_cast<unsigned char>(right[i]);
  return differs == 0;
}

// A part, with descriptors of its own.
struct Served {
  explicit Served(const KeptPart& of) : part(of), message(peer::packed(of)) {
    for (const KeptObject& one : of.objects) {
      memory.emplace_back(::fcntl(one.fd, F_DUPFD_CLOEXEC, 0));
      if (!memory.back()) throw_errno(errno, "fcntl", one.name);
    }
  }
  [[nodiscard]] bool is(const std::string& writer, std::uint64_t number) const {
    return part.writer == writer && part.number == number;
  }

  const KeptPart part;
  const peer::Bytes message;
  std::vector<Fd> memory;  // as part.objects has them
};

}  // namespace

class ArenaServer::Impl {
 public:
  explicit Impl(const ArenaServerOptions& options) : options_(options) {
    Chosen chosen = listening();
    listener_ = std::move(chosen.listener);
    interface_ = std::move(chosen.text);
    address_ = {std::move(chosen.host), port_of(listener_), random_token()};
    greeting_ = std::string(peer::kGreeting) + address_.token;
    wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) throw_errno(errno, "eventfd", "a server of snapshots");
    taker_ = std::thread([this] { take_all(); });
  }
  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    wake();
    taker_.join();
    for (const Session& one : sessions_) one.connection.end();
    for (Session& one : sessions_) one.thread.join();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const PeerAddress& address() const noexcept { return address_; }
  [[nodiscard]] const std::string& interface() const noexcept { return interface_; }

  void serve(std::shared_ptr<const Served> served) noexcept {
    {
      const std::lock_guard lock(mutex_);
      served_.swap(served);
    }
    changed_.notify_all();
  }

 private:
  struct Session {
    Session(Fd socket, std::chrono::milliseconds silence)
        : connection(std::move(socket), "a reader", silence) {}

    Connection connection;
    std::atomic<bool> is_over = false;
    std::thread thread;
  };

  void wake() const noexcept { (void)::eventfd_write(wake_.get(), 1); }

  // The thread that takes connections. It alone changes the list, as long as it runs.
  void take_all() {
    while (!is_ending_) {
      sessions_.remove_if([](Session& one) {
        const bool is_over = one.is_over;
        if (is_over) one.thread.join();
        return is_over;
      });
      const bool is_full = sessions_.size() >= options_.most_connections;
      std::array<pollfd, 2> asked{{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}}};
      if (::poll(asked.data(), is_full ? 1 : 2, -1) < 0) continue;  // a signal
      eventfd_t count = 0;
      if (asked[0].revents != 0) (void)::eventfd_read(wake_.get(), &count);
      if (asked[1].revents != 0 && !is_ending_ && !take_one()) pause();
    }
  }

  // Until there are descriptors or threads again.
  void pause() const {
    constexpr int kMilliseconds = 100;
    pollfd asked{wake_.get(), POLLIN, 0};
    (void)::poll(&asked, 1, kMilliseconds);
  }

  bool take_one() {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
    Session& session = sessions_.emplace_back(std::move(socket), options_.silence);
    try {
      session.thread = std::thread([this, &session] { attend(session); });
    } catch (const std::system_error&) {
      sessions_.pop_back();
      return false;
    }
    return true;
  }

  void attend(Session& session) const noexcept {
    sigset_t broken_pipe;
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    (void)::pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
    try {
      bool goes_on = hear_hello(session.connection);
      while (goes_on && !is_ending_) goes_on = answer(session.connection);
    } catch (const std::exception&) {
      // The reader has gone, or is none of ours.
    }
    session.connection.end();
    session.is_over = true;
    wake();
  }

  // Whoever does not know the token has little time for all of it.
  bool hear_hello(const Connection& from) const {
    constexpr std::chrono::milliseconds kMost{3'000};
    const peer::WaitEnd soon{.at = std::chrono::steady_clock::now() +
                                   std::min(options_.silence, kMost)};
    const auto head = from.receive_head(soon);
    if (!head || head->kind != FrameKind::hello || head->size != greeting_.size()) return false;
    if (!is_same_secret(from.receive(head->size, soon), greeting_)) return false;
    from.send(FrameKind::welcome, {}, {});
    return true;
  }

  // False: the connection is to end.
  bool answer(const Connection& to) const {
    const auto head = to.receive_head({});
    if (!head) return false;
    const peer::Bytes question = to.receive(head->size, {});
    if (head->kind == FrameKind::sign) return true;
    if (head->kind == FrameKind::next) return answer_next(to, question);
    return head->kind == FrameKind::read && answer_read(to, question);
  }

  bool answer_next(const Connection& to, ByteView question) const {
    constexpr int kMostUnheard = 8;  // signs, over a time of `silence`
    peer::Unpacker unpacker(question);
    const std::string writer = unpacker.text();
    const std::uint64_t number = unpacker.number();
    unpacker.require_end();
    const auto another = [&] { return served_ && !served_->is(writer, number); };
    for (int unheard = 0; unheard <= kMostUnheard; ++unheard) {
      std::shared_ptr<const Served> found;
      {
        std::unique_lock lock(mutex_);
        (void)changed_.wait_for(lock, options_.silence / kMostUnheard,
                                [&] { return is_ending_ || another(); });
        if (is_ending_) return false;
        if (another()) found = served_;
      }
      if (found) {
        to.send(FrameKind::part, found->message, {});
        return true;
      }
      to.send(FrameKind::sign, {}, {});
      for (; to.has_input(); unheard = 0) {
        const auto head = to.receive_head({});
        if (!head || head->kind != FrameKind::sign) return false;
      }
    }
    return false;
  }

  bool answer_read(const Connection& to, ByteView question) const {
    peer::Unpacker unpacker(question);
    const std::string writer = unpacker.text();
    const std::uint64_t number = unpacker.number();
    const std::string name = unpacker.text();
    const std::uint64_t offset = unpacker.number(), size = unpacker.number();
    unpacker.require_end();
    if (size > peer::kMostRead) return false;
    const auto served = now_served();
    if (!served || !served->is(writer, number)) {
      to.send(FrameKind::gone, {}, {});
      return true;
    }
    const auto& objects = served->part.objects;
    const auto found = std::ranges::find(objects, name, &KeptObject::name);
    if (found == objects.end() || offset > found->bytes || size > found->bytes - offset)
      return false;
    const Fd& memory = served->memory.at(static_cast<std::size_t>(found - objects.begin()));
    to.send_memory(FrameKind::data, {memory.get(), offset, static_cast<std::uint32_t>(size)}, {});
    return true;
  }

  std::shared_ptr<const Served> now_served() const {
    const std::lock_guard lock(mutex_);
    return served_;
  }

  const ArenaServerOptions options_;
  Fd listener_, wake_;
  PeerAddress address_;
  std::string interface_, greeting_;
  std::list<Session> sessions_;
  std::atomic<bool> is_ending_ = false;  // changes under mutex_
  mutable std::mutex mutex_;             // guards what follows
  mutable std::condition_variable changed_;
  std::shared_ptr<const Served> served_;  // null: nothing. Answers under way have it, too
  std::thread taker_;
};

ArenaServer::ArenaServer(const ArenaServerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

ArenaServer::~ArenaServer() {
  // A child of fork() has none of the threads.
  if (!made_here_) (void)impl_.release();
}

const PeerAddress& ArenaServer::address() const noexcept {
  return impl_->address();
}

const std::string& ArenaServer::interface() const noexcept {
  return impl_->interface();
}

void ArenaServer::serve(const KeptPart& part) {
  impl_->serve(std::make_shared<const Served>(part));
}

void ArenaServer::serve_nothing() noexcept {
  impl_->serve(nullptr);
}

}  // namespace tessera
