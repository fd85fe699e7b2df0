#include "checkpoint/background/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "base/numbers.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions{100};
constexpr std::size_t kHeadBytes = 1 + 2 * sizeof(std::uint64_t);

[[noreturn]] void refuse(const char* what) {
  throw Error(ErrorCode::io, std::string(what) + ": " + std::system_category().message(errno));
}

// The control data of a message with one descriptor.
union DescriptorRoom {
  cmsghdr head;
  std::array<char, CMSG_SPACE(sizeof(int))> bytes;
};

void put_descriptor(msghdr& message, DescriptorRoom& room, int fd) {
  message.msg_control = room.bytes.data();
  message.msg_controllen = room.bytes.size();
  cmsghdr* const control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
}

Fd descriptor_of(msghdr& message) {
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(at), sizeof fd);
    return Fd(fd);
  }
  return {};
}

bool await_event(int fd, std::int16_t events, std::chrono::milliseconds within) {
  pollfd asked{fd, events, 0};
  const int ready =
      uninterrupted([&] { return ::poll(&asked, 1, static_cast<int>(within.count())); });
  if (ready < 0) refuse("a connection to a writer process cannot be waited for");
  return ready > 0;
}

}  // namespace

std::pair<Channel, Fd> Channel::pair() {
  std::array<int, 2> sockets{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()) != 0)
    refuse("no connection for a writer process");
  return {Channel(Fd(sockets[0])), Fd(sockets[1])};
}

void Channel::send_all(ByteView bytes, int fd, const std::function<bool()>& goes_on) const {
  while (!bytes.empty()) {
    if (!await_event(socket_.get(), POLLOUT, kBetweenQuestions)) {
      if (goes_on()) continue;
      throw Error(ErrorCode::timeout, "the other side of a writer's connection does not read");
    }
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // as writev() has it
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    DescriptorRoom room{};
    if (fd >= 0) put_descriptor(message, room, fd);
    const auto sent = uninterrupted(
        [&] { return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
    if (sent < 0 && errno == EAGAIN) continue;
    if (sent < 0) refuse("the other side of a writer's connection has gone");
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
    fd = -1;  // it went with the first byte
  }
}

void Channel::send(const Frame& frame, const std::function<bool()>& goes_on) const {
  Bytes bytes;
  bytes.reserve(kHeadBytes + frame.content.size());
  bytes.push_back(static_cast<std::byte>(frame.kind));
  append_le(bytes, frame.job);
  append_le(bytes, static_cast<std::uint64_t>(frame.content.size()));
  bytes.insert(bytes.end(), frame.content.begin(), frame.content.end());
  try {
    send_all(bytes, frame.fd.get(), goes_on);
  } catch (...) {
    end();
    throw;
  }
}

bool Channel::has_room() const {
  return await_event(socket_.get(), POLLOUT, std::chrono::milliseconds(0));
}

bool Channel::await(std::chrono::milliseconds within) const {
  return await_event(socket_.get(), POLLIN, within);
}

// Whether they came; false: the connection has ended before the first.
bool Channel::receive_all(MutableByteView bytes, Fd* fd) const {
  bool is_first = true;
  while (!bytes.empty()) {
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    DescriptorRoom room{};
    message.msg_control = room.bytes.data();
    message.msg_controllen = room.bytes.size();
    const auto got =
        uninterrupted([&] { return ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC); });
    if (got < 0 && errno != ECONNRESET) refuse("a writer's connection cannot be read");
    if (got <= 0) return false;
    if (Fd found = descriptor_of(message); found && fd != nullptr && is_first)
      *fd = std::move(found);
    is_first = false;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

std::optional<Frame> Channel::receive() const {
  std::array<std::byte, kHeadBytes> head{};
  Frame frame;
  if (!receive_all(head, &frame.fd)) return std::nullopt;
  frame.kind = static_cast<FrameKind>(head[0]);
  if (frame.kind > FrameKind::log)
    throw Error(ErrorCode::corrupt, "a writer's connection has what is no frame");
  frame.job = load_le<std::uint64_t>(head.data() + 1);
  const auto size = load_le<std::uint64_t>(head.data() + 1 + sizeof(std::uint64_t));
  if (size > frame.content.max_size())
    throw Error(ErrorCode::corrupt, "a writer's connection has a frame of no size");
  frame.content.resize(static_cast<std::size_t>(size));
  if (!receive_all(frame.content, nullptr)) return std::nullopt;
  return frame;
}

void Channel::end_sending() const noexcept {
  (void)::shutdown(socket_.get(), SHUT_WR);
}

void Channel::end() const noexcept {
  (void)::shutdown(socket_.get(), SHUT_RDWR);
}

}  // namespace tessera
