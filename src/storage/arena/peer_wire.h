// Frames between a server of what a writer process keeps and its readers, over TCP connections on
// which every wait has an end.
//
// A frame is its kind (1 byte), the number of bytes behind that (4 bytes) and these bytes. Numbers
// have 8 bytes, the little end first; a text is its length (4 bytes) and its bytes.
//
//   a reader says                            the server answers
//   hello  the greeting and the token        welcome; to anything else it says nothing and ends
//   next   a writer, a number                sign now and then, which the reader answers by sign;
//                                            part once another one is served
//   read   a writer, a number, an object,    data, so many bytes; gone if that part is not served
//          the offset, the size
//   sign   nothing                           nothing
//
// A reader may say the next before it has the answer: answers come in the order of questions.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "storage/arena/arenas.h"
#include "tessera/io.h"

namespace tessera::peer {

using Bytes = std::vector<std::byte>;

enum class FrameKind : std::uint8_t { hello, next, read, sign, welcome, part, data, gone };

inline constexpr std::string_view kGreeting = "tessera arena 1 ";
inline constexpr std::size_t kTokenDigits = 64;
inline constexpr std::uint32_t kMostRead = 8U << 20U;  // bytes of one answer

struct FrameHead {
  FrameKind kind{};
  std::uint32_t size = 0;  // of what follows: no more than such a frame may have
};

// Bytes of a memfd.
struct MemoryRange {
  int memory = -1;
  std::uint64_t offset = 0;
  std::uint32_t size = 0;
};

// When a wait ends besides by what is waited for.
struct WaitEnd {
  std::stop_token stop = {};
  std::optional<std::chrono::steady_clock::time_point> at = {};
};

// One end of a connection. One thread receives and one sends at a time; any may end it. Every
// member that waits throws `peer_failed` when nothing moves for `silence`, when `at` has come and
// when the other end has gone, and `cancelled` when asked to stop, also by HeedStop.
class Connection {
 public:
  // `name`: of the other end, for errors.
  Connection(Fd socket, std::string name, std::chrono::milliseconds silence);

  void send(FrameKind kind, ByteView content, const WaitEnd& end) const;
  // The thread has SIGPIPE blocked, since sendfile() cannot do without it.
  void send_memory(FrameKind kind, MemoryRange range, const WaitEnd& end) const;
  // Without a wait. False: it cannot be sent.
  [[nodiscard]] bool send_sign() const noexcept;

  // None: the other end has gone, and had sent no part of another frame. Throws `corrupt` for what
  // is no head of a frame.
  [[nodiscard]] std::optional<FrameHead> receive_head(const WaitEnd& end) const;
  // The next bytes, all of them.
  void receive(MutableByteView out, const WaitEnd& end) const;
  [[nodiscard]] Bytes receive(std::uint32_t size, const WaitEnd& end) const;
  // Whether there is something to receive now, be it the end.
  [[nodiscard]] bool has_input() const;

  void await(std::int16_t events, const WaitEnd& end) const;
  void end() const noexcept;

  [[nodiscard]] int socket() const noexcept { return socket_.get(); }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[noreturn]] void refuse(const std::string& what) const;           // `peer_failed`
  [[noreturn]] void refuse_call(const char* call, int error) const;  // likewise

 private:
  void send_bytes(ByteView bytes, int flags, const WaitEnd& end) const;
  // The number of bytes that came first; 0: the other end has gone.
  [[nodiscard]] std::size_t receive_some(MutableByteView out, const WaitEnd& end) const;

  const Fd socket_;
  const std::string name_;
  const std::chrono::milliseconds silence_;
};

// What stands in frames.

class Packer {
 public:
  Packer& number(std::uint64_t value);
  Packer& text(std::string_view text);
  [[nodiscard]] const Bytes& bytes() const noexcept { return bytes_; }

 private:
  Bytes bytes_;
};

// Each throws `corrupt` where the bytes end too early, or are none that a Packer made.
class Unpacker {
 public:
  explicit Unpacker(ByteView bytes) : rest_(bytes) {}
  [[nodiscard]] std::uint64_t number();
  [[nodiscard]] std::string text();
  void require_end() const;

 private:
  [[nodiscard]] ByteView take(std::size_t size);

  ByteView rest_;
};

// Throws `unsupported` for a part that nobody could unpack.
[[nodiscard]] Bytes packed(const KeptPart& part);
// Throws `corrupt` also for what a KeptNotice cannot say and for objects of unlikely sizes.
[[nodiscard]] KeptPart unpacked_part(ByteView bytes);

// Addresses of sockets.

struct Endpoint {
  sockaddr_storage storage{};
  socklen_t size = 0;

  [[nodiscard]] sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  [[nodiscard]] const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
// None: `host` is no number.
[[nodiscard]] std::optional<Endpoint> endpoint_of(const std::string& host, std::uint16_t port);
// The number of the host. Of IPv4 and IPv6 alone.
[[nodiscard]] std::string host_of(const sockaddr& address);

}  // namespace tessera::peer
