// The connection of a trainer to its writer process: frames, and with one a file descriptor.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/process.h"
#include "tessera/comm.h"
#include "tessera/io.h"

namespace tessera {

enum class FrameKind : std::uint8_t {
  // From the trainer.
  hello,  // who the writer is, first of all
  arena,  // the memory that trees from now on lie in, with its descriptor
  job,    // a save whose tree is staged; it waits for one of the next two
  go,     // all ranks have staged it
  drop,   // some rank has not
  stop,   // it is to end
  // From the writer.
  begun,  // of a job: who opens the place sees that it is under way
  event,  // of a job
  progress,
  result,
  failure,
  sign,  // of life
  log,
};

struct Frame {
  FrameKind kind{};
  Bytes content;
  Fd fd;  // none: the frame has none
};

// One thread receives and any may send.
class Channel {
 public:
  explicit Channel(Fd socket) : socket_(std::move(socket)) {}
  // Two that are connected. Throws `io`.
  [[nodiscard]] static std::pair<Channel, Fd> pair();

  // Throws `io` when the other side has gone, or does not read for so long.
  void send(FrameKind kind, ByteView content, int fd = -1) const;
  // Whether there is room for what is sent: the other side reads.
  [[nodiscard]] bool has_room() const;
  // Whether something can be received, at the latest after `within`.
  [[nodiscard]] bool await(std::chrono::milliseconds within) const;
  // Null: the other side has gone. Throws `corrupt` for what is no frame.
  [[nodiscard]] std::optional<Frame> receive() const;
  // The other side hears that nothing more is sent.
  void end_sending() const noexcept;

 private:
  [[nodiscard]] bool receive_all(MutableByteView bytes, Fd* fd) const;
  void send_all(ByteView bytes, int fd) const;

  Fd socket_;
};

}  // namespace tessera
