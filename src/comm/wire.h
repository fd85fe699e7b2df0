// Wire: a connection to one other rank that carries blocks of bytes.
#pragma once

#include <cstddef>
#include <span>

namespace tessera {

// One thread sends and another receives. Each block arrives as it was sent: the other side receives
// as many bytes at once as this one sends at once.
class Wire {
 public:
  virtual ~Wire() = default;
  Wire() = default;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Returns when `bytes` may change. Throws Error when the connection has ended.
  virtual void send(std::span<const std::byte> bytes) = 0;
  // Fills `bytes`. Throws Error when the connection has ended.
  virtual void receive(std::span<std::byte> bytes) = 0;
  // Makes send and receive throw, the ones under way too, whatever the other rank does. Any thread
  // may call this.
  virtual void shut_down() noexcept = 0;
};

}  // namespace tessera
