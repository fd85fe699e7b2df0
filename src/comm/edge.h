// Wire: a connection to one other rank that carries blocks of bytes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "tessera/comm.h"

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

// Edge: one neighbour of this rank in a tree of ranks, with a thread that writes to it and one that
// reads from it.
//
// What goes to a neighbour is cut into frames, so that a long message delays nothing that is
// urgent: between two frames of a message there is room for an interrupt, a failure or a sign of
// life. The writing thread gives a sign of life whenever it has written nothing for a while,
// whatever the rank itself does.

// A collective that a rank is in.
struct Call {
  std::uint64_t number = 0;  // among the rank's collectives, from 1 on
  std::string name;          // called_here() of comm/whereabouts.h
};

// What a rank has to say to a neighbour in a collective.
struct Letter {
  Call call;
  Bytes content;
};

// What a sign of life says of its rank.
struct Pulse {
  std::uint64_t progress = 0;  // bytes, by Group::make_progress
  int awaited = -1;            // the rank that it waits for in a collective; -1: it is in none
};

// Whoever owns edges is told by their threads; of one edge, one thing at a time.
class EdgeOwner {
 public:
  virtual ~EdgeOwner() = default;

  virtual void letter_came(int peer, Letter letter) = 0;
  // The peer has sent all that it has to send before it goes on from this call.
  virtual void peer_waits(int peer, Call call) = 0;
  virtual void peer_interrupts(int peer, std::uint64_t fold) = 0;
  virtual void peer_tells_failure(int peer, const Error& failure) = 0;
  virtual void peer_left(int peer) = 0;  // it needs the group no more
  // Without that nothing can be heard from it any more.
  virtual void peer_lost(int peer, const Error& why) = 0;
  virtual void all_sent() = 0;  // an edge is quiet
  [[nodiscard]] virtual Pulse pulse() = 0;
};

class Edge {
 public:
  using Clock = std::chrono::steady_clock;

  // Signs of life go out every `beat`. The owner outlives the edge.
  Edge(std::unique_ptr<Wire> wire, int peer, EdgeOwner& owner, std::chrono::milliseconds beat);
  ~Edge() { stop(); }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;

  // These return at once. What is urgent overtakes letters.
  void post(Call call, std::shared_ptr<const Bytes> content);
  void post_waiting(const Call& call);
  void post_interrupt(std::uint64_t fold);
  // The last that the peer is told: letters that are not sent yet are dropped.
  void post_failure(const Error& failure);
  // Says, when all else is sent, that this rank leaves.
  void post_farewell();

  // Whether all that was posted is sent, or never will be.
  [[nodiscard]] bool quiet() const;
  [[nodiscard]] Clock::time_point last_heard() const noexcept { return last_heard_.load(); }
  [[nodiscard]] Pulse last_pulse() const;

  // Ends the connection and both threads. The owner calls this without a lock that it takes when it
  // is told something.
  void stop() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Outgoing {
    Call call;
    std::shared_ptr<const Bytes> content;
  };

  void post_urgent(Bytes frame);
  void run(const std::function<void()>& work) noexcept;
  void read_and_tell();
  void write_and_tell();

  void write_until_farewell();
  void write_urgent(Lock& lock);
  void write_letter(Lock& lock);
  void write_beat(Lock& lock);
  void write_frame(const Bytes& frame);

  void read_until_farewell();
  // Returns false for the last frame.
  [[nodiscard]] bool read_frame();
  void read_letter(std::uint64_t number, std::span<const std::byte> payload);
  void read_part(std::size_t size);
  [[nodiscard]] Bytes read_payload(std::span<const std::byte> frame);

  const std::unique_ptr<Wire> wire_;
  const int peer_;
  EdgeOwner& owner_;
  const std::chrono::milliseconds beat_;
  std::atomic<Clock::time_point> last_heard_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Bytes> urgent_;      // frames
  std::deque<Outgoing> letters_;  // the first may be under way
  bool writing_ = false;          // what was taken out of `urgent_`
  bool farewell_ = false;         // to be said, or said
  bool ended_ = false;            // nothing will be sent any more
  bool stopping_ = false;
  Pulse pulse_;  // the peer's last

  // The letter of which parts are still to come; the reading thread alone uses these.
  Letter incoming_;
  std::size_t filled_ = 0;
  bool parts_follow_ = false;

  std::thread reader_;
  std::thread writer_;
};

}  // namespace tessera
