#include "storage/arena/peer_wire.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/sendfile.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/numbers.h"
#include "base/parallel.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera::peer {
namespace {

constexpr std::size_t kHeadBytes = 1 + sizeof(std::uint32_t);
constexpr std::uint32_t kMostText = 1U << 16U;  // bytes: a path has 4096
constexpr std::uint64_t kMostObjects = 16;
constexpr std::uint64_t kMostObjectBytes = std::uint64_t{1} << 48U;

std::uint32_t most_of(FrameKind kind) {
  switch (kind) {
    case FrameKind::hello:
      return kGreeting.size() + kTokenDigits;
    case FrameKind::next:
    case FrameKind::read:
    case FrameKind::part:
      return 4 * kMostText;
    case FrameKind::data:
      return kMostRead;
    case FrameKind::sign:
    case FrameKind::welcome:
    case FrameKind::gone:
      break;
  }
  return 0;
}

[[noreturn]] void refuse_frame(const std::string& what) {
  throw Error(ErrorCode::corrupt, "a connection of snapshots has " + what);
}

std::array<std::byte, kHeadBytes> head_of_frame(FrameKind kind, std::size_t size) {
  std::array<std::byte, kHeadBytes> head{};
  head[0] = static_cast<std::byte>(kind);
  store_le(head.data() + 1, narrow<std::uint32_t>(size));
  return head;
}

void set_option(int socket, int level, int option) {
  const int on = 1;
  (void)::setsockopt(socket, level, option, &on, sizeof on);
}

bool is_line(const std::string& text) {
  return std::ranges::none_of(text, [](unsigned char c) { return std::iscntrl(c) != 0; });
}

// Such a text is one word of a notice, and a name in a directory.
bool is_word(const std::string& text) {
  return !text.empty() && text.front() != '.' && std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
  });
}

}  // namespace

Connection::Connection(Fd socket, std::string name, std::chrono::milliseconds silence)
    : socket_(std::move(socket)), name_(std::move(name)), silence_(silence) {
  set_option(socket_.get(), IPPROTO_TCP, TCP_NODELAY);
  set_option(socket_.get(), SOL_SOCKET, SO_KEEPALIVE);
}

void Connection::refuse(const std::string& what) const {
  throw Error(ErrorCode::peer_failed, name_ + " " + what);
}

void Connection::refuse_call(const char* call, int error) const {
  refuse("is lost: " + std::string(call) + ": " + std::system_category().message(error));
}

// Of a time in which this process was stopped, hardly anything counts.
void Connection::await(std::int16_t events, const WaitEnd& end) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kMostBetweenLooks{100};
  const auto slice = std::clamp(silence_ / 8, std::chrono::milliseconds(1), kMostBetweenLooks);
  Clock::duration waited{};
  for (auto last = Clock::now(); waited < silence_;) {
    require_going_on(end.stop);
    if (HeedStop::is_requested()) throw_cancelled();
    pollfd asked{socket_.get(), events, 0};
    const int ready = ::poll(&asked, 1, static_cast<int>(slice.count()));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) refuse_call("poll", errno);
    const auto now = Clock::now();
    waited += std::min<Clock::duration>(now - last, slice);
    last = now;
    if (end.at && now >= *end.at) refuse("does not answer in time");
  }
  refuse("says nothing for " + std::to_string(silence_.count()) + " ms");
}

void Connection::send_bytes(ByteView bytes, int flags, const WaitEnd& end) const {
  while (!bytes.empty()) {
    const ssize_t sent = uninterrupted([&] {
      return ::send(socket_.get(), bytes.data(), bytes.size(), flags | MSG_NOSIGNAL | MSG_DONTWAIT);
    });
    if (sent < 0 && errno != EAGAIN) refuse_call("send", errno);
    if (sent < 0) {
      await(POLLOUT, end);
    } else {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
}

void Connection::send(FrameKind kind, ByteView content, const WaitEnd& end) const {
  const auto head = head_of_frame(kind, content.size());
  Bytes frame(head.begin(), head.end());
  frame.insert(frame.end(), content.begin(), content.end());
  send_bytes(frame, 0, end);
}

void Connection::send_memory(FrameKind kind, MemoryRange range, const WaitEnd& end) const {
  send_bytes(head_of_frame(kind, range.size), range.size == 0 ? 0 : MSG_MORE, end);
  auto at = static_cast<off_t>(range.offset);
  for (std::size_t left = range.size; left > 0;) {
    const ssize_t sent =
        uninterrupted([&] { return ::sendfile(socket_.get(), range.memory, &at, left); });
    if (sent == 0) refuse("reads memory that was cut off");
    if (sent < 0 && errno != EAGAIN) refuse_call("sendfile", errno);
    if (sent < 0) {
      await(POLLOUT, end);
    } else {
      left -= static_cast<std::size_t>(sent);
    }
  }
}

bool Connection::send_sign() const noexcept {
  const std::array<std::byte, kHeadBytes> head{static_cast<std::byte>(FrameKind::sign)};
  return ::send(socket_.get(), head.data(), head.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(head.size());
}

std::size_t Connection::receive_some(MutableByteView out, const WaitEnd& end) const {
  while (true) {
    const ssize_t got =
        uninterrupted([&] { return ::recv(socket_.get(), out.data(), out.size(), MSG_DONTWAIT); });
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno == ECONNRESET) return 0;
    if (errno != EAGAIN) refuse_call("recv", errno);
    await(POLLIN, end);
  }
}

void Connection::receive(MutableByteView out, const WaitEnd& end) const {
  while (!out.empty()) {
    const std::size_t got = receive_some(out, end);
    if (got == 0) refuse("has ended the connection");
    out = out.subspan(got);
  }
}

Bytes Connection::receive(std::uint32_t size, const WaitEnd& end) const {
  Bytes content(size);
  receive(content, end);
  return content;
}

std::optional<FrameHead> Connection::receive_head(const WaitEnd& end) const {
  std::array<std::byte, kHeadBytes> bytes{};
  const std::size_t got = receive_some(bytes, end);
  if (got == 0) return std::nullopt;
  receive(MutableByteView(bytes).subspan(got), end);
  const FrameHead head{static_cast<FrameKind>(bytes[0]), load_le<std::uint32_t>(bytes.data() + 1)};
  if (head.kind > FrameKind::gone || head.size > most_of(head.kind))
    refuse_frame("what is no frame, with " + name_);
  return head;
}

bool Connection::has_input() const {
  pollfd asked{socket_.get(), POLLIN, 0};
  return uninterrupted([&] { return ::poll(&asked, 1, 0); }) != 0;
}

void Connection::end() const noexcept {
  (void)::shutdown(socket_.get(), SHUT_RDWR);
}

Packer& Packer::number(std::uint64_t value) {
  append_le(bytes_, value);
  return *this;
}

Packer& Packer::text(std::string_view text) {
  append_le(bytes_, narrow<std::uint32_t>(text.size()));
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  bytes_.insert(bytes_.end(), begin, begin + text.size());
  return *this;
}

ByteView Unpacker::take(std::size_t size) {
  if (size > rest_.size()) refuse_frame("a frame that ends early");
  const ByteView taken = rest_.first(size);
  rest_ = rest_.subspan(size);
  return taken;
}

std::uint64_t Unpacker::number() {
  return load_le<std::uint64_t>(take(sizeof(std::uint64_t)).data());
}

std::string Unpacker::text() {
  const auto size = load_le<std::uint32_t>(take(sizeof(std::uint32_t)).data());
  const ByteView bytes = take(size);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void Unpacker::require_end() const {
  if (!rest_.empty()) refuse_frame("a frame that goes on behind its end");
}

Bytes packed(const KeptPart& part) {
  Packer packer;
  packer.text(part.place).text(part.writer).number(part.number);
  packer.number(static_cast<std::uint64_t>(part.rank))
      .number(static_cast<std::uint64_t>(part.size));
  packer.number(part.made).number(part.is_step ? 1 : 0).number(part.stored);
  packer.text(part.trainer).text(same_host::to_text(part.process)).number(part.objects.size());
  for (const KeptObject& one : part.objects) {
    packer.text(one.name).number(static_cast<std::uint64_t>(one.fd)).number(one.bytes);
    packer.number(one.device).number(one.inode);
  }
  try {
    if (packer.bytes().size() > most_of(FrameKind::part)) refuse_frame("too long a part");
    (void)unpacked_part(packer.bytes());
  } catch (const Error& error) {
    throw Error(ErrorCode::unsupported, "peers cannot take this part: " + error.message())
        .at_path(part.place);
  }
  return packer.bytes();
}

KeptPart unpacked_part(ByteView bytes) {
  constexpr std::uint64_t kMostRanks = std::uint64_t{1} << 30U;
  Unpacker unpacker(bytes);
  KeptPart part;
  part.place = unpacker.text();
  part.writer = unpacker.text();
  part.number = unpacker.number();
  const std::uint64_t rank = unpacker.number(), size = unpacker.number();
  if (size > kMostRanks || rank >= size) refuse_frame("a part of no rank");
  part.rank = static_cast<int>(rank);
  part.size = static_cast<int>(size);
  part.made = unpacker.number();
  part.is_step = unpacker.number() == 1;
  part.stored = unpacker.number();
  part.trainer = unpacker.text();
  if (!is_line(part.place) || !is_word(part.writer) || !is_line(part.trainer))
    refuse_frame("a part whose names nobody can keep");
  part.process = same_host::process_from_text(unpacker.text());
  std::uint64_t left = unpacker.number();
  if (left > kMostObjects) refuse_frame("a part of " + std::to_string(left) + " objects");
  for (; left > 0; --left) {
    KeptObject one;
    one.name = unpacker.text();
    one.fd = static_cast<int>(static_cast<std::int64_t>(unpacker.number()));
    one.bytes = unpacker.number();
    one.device = unpacker.number();
    one.inode = unpacker.number();
    if (!is_word(one.name) || one.bytes > kMostObjectBytes)
      refuse_frame("an object that nobody can keep");
    part.objects.push_back(std::move(one));
  }
  unpacker.require_end();
  return part;
}

std::optional<Endpoint> endpoint_of(const std::string& host, std::uint16_t port) {
  Endpoint found;
  auto& four = reinterpret_cast<sockaddr_in&>(found.storage);
  auto& six = reinterpret_cast<sockaddr_in6&>(found.storage);
  if (::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    found.size = sizeof four;
  } else if (::inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    found.size = sizeof six;
  } else {
    return std::nullopt;
  }
  return found;
}

std::string host_of(const sockaddr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* const number =
      address.sa_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(address).sin_addr)
          : &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  (void)::inet_ntop(address.sa_family, number, text.data(), text.size());
  return text.data();
}

}  // namespace tessera::peer
