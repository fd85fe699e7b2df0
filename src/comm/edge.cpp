// A frame is one block of kFrame bytes: its kind (1 byte), 3 bytes of nothing, the size of its
// payload (4 bytes), a number (8 bytes), and the payload; one that does not fit is a block of its
// own behind the frame. Numbers are little-endian. What the number and the payload are:
//
//   letter, waiting  the number of the call; the size of the content (8 bytes), of the name (4
//                    bytes), the name, and the content if it fits
//   part             -; the next bytes of the content of the last letter, in a block of their own
//   beat             the progress; the rank that is awaited (4 bytes)
//   interrupt        the number of the fold; nothing
//   failure          -; the error
//   farewell         -; nothing
#include "comm/edge.h"

#include <algorithm>
#include <utility>

#include "base/numbers.h"
#include "comm/confer.h"
#include "comm/message.h"

namespace tessera {
namespace {

enum class Kind : std::uint8_t { letter, waiting, part, beat, interrupt, failure, farewell };

constexpr std::size_t kFrame = 512, kSizeAt = 4, kNumberAt = 8, kHead = 16;
constexpr std::size_t kRoom = kFrame - kHead;
constexpr std::size_t kLetterHead = 12;  // bytes of a letter's payload before the name
// The bytes of a message between two chances for what is urgent.
constexpr std::size_t kPart = std::size_t{1} << 20;
// Errors that ranks tell are sentences.
constexpr std::size_t kLongestPayload = std::size_t{1} << 20;

Bytes frame_of(Kind kind, std::uint64_t number, std::span<const std::byte> payload) {
  Bytes frame(kFrame);
  frame[0] = static_cast<std::byte>(kind);
  store_le(frame.data() + kSizeAt, narrow<std::uint32_t>(payload.size()));
  store_le(frame.data() + kNumberAt, number);
  if (payload.size() > kRoom) frame.resize(kFrame + payload.size());
  const std::size_t at = payload.size() > kRoom ? kFrame : kHead;
  std::ranges::copy(payload, frame.begin() + static_cast<std::ptrdiff_t>(at));
  return frame;
}

bool fits(const Call& call, const Bytes& content) {
  return kLetterHead + call.name.size() + content.size() <= kRoom;
}

Bytes frame_of(Kind kind, const Call& call, const Bytes& content) {
  Bytes payload;
  append_le(payload, static_cast<std::uint64_t>(content.size()));
  append_le(payload, narrow<std::uint32_t>(call.name.size()));
  const Bytes name = to_bytes(call.name);
  payload.insert(payload.end(), name.begin(), name.end());
  if (fits(call, content)) payload.insert(payload.end(), content.begin(), content.end());
  return frame_of(kind, call.number, payload);
}

Error nonsense() {
  return {ErrorCode::corrupt, "a frame between ranks makes no sense"};
}

struct LetterHead {
  Call call;
  std::uint64_t size = 0;            // of the content
  std::span<const std::byte> begin;  // all of it, or nothing
};

LetterHead letter_head_of(std::uint64_t number, std::span<const std::byte> payload) {
  if (payload.size() < kLetterHead) throw nonsense();
  LetterHead head;
  head.size = load_le<std::uint64_t>(payload.data());
  const auto name = load_le<std::uint32_t>(payload.data() + sizeof(std::uint64_t));
  payload = payload.subspan(kLetterHead);
  if (name > payload.size()) throw nonsense();
  head.begin = payload.subspan(name);
  if (!head.begin.empty() && head.begin.size() != head.size) throw nonsense();
  head.call = {number, to_text(Bytes(payload.begin(), payload.begin() + name))};
  return head;
}

}  // namespace

Edge::Edge(std::unique_ptr<Wire> wire, int peer, EdgeOwner& owner, std::chrono::milliseconds beat)
    : wire_(std::move(wire)), peer_(peer), owner_(owner), beat_(beat), last_heard_(Clock::now()) {
  reader_ = std::thread([this] { run([this] { read_and_tell(); }); });
  try {
    writer_ = std::thread([this] { run([this] { write_and_tell(); }); });
  } catch (...) {
    stop();
    throw;
  }
}

void Edge::stop() noexcept {
  {
    const Lock lock(mutex_);
    stopping_ = ended_ = true;
  }
  wire_->shut_down();
  changed_.notify_all();
  if (reader_.joinable()) reader_.join();
  if (writer_.joinable()) writer_.join();
}

// The connection ends if `work` throws, which every neighbour notices: where memory is short it may
// not even be there for saying so.
void Edge::run(const std::function<void()>& work) noexcept {
  try {
    work();
  } catch (...) {
    const Lock lock(mutex_);
    ended_ = true;
    wire_->shut_down();
  }
  changed_.notify_all();
}

void Edge::read_and_tell() {
  const auto failure = failure_of([this] { read_until_farewell(); });
  bool wanted = false;
  {
    const Lock lock(mutex_);
    ended_ = true;
    wanted = !stopping_ && !farewell_;
  }
  changed_.notify_all();
  if (!wanted) return;
  if (failure) {
    owner_.peer_lost(peer_, *failure);
  } else {
    owner_.peer_left(peer_);
  }
}

// Whether the peer has left or is lost, the reading thread says: what the peer sent before its end
// may still be on its way to it.
void Edge::write_and_tell() {
  const auto failure = failure_of([this] { write_until_farewell(); });
  {
    const Lock lock(mutex_);
    ended_ = true;
  }
  // If it is not the connection that has failed, nobody notices before it ends.
  const bool is_connected =
      failure && failure->code() != ErrorCode::peer_failed && failure->code() != ErrorCode::timeout;
  if (is_connected) wire_->shut_down();
  owner_.all_sent();
}

void Edge::post(Call call, std::shared_ptr<const Bytes> content) {
  {
    const Lock lock(mutex_);
    letters_.push_back({std::move(call), std::move(content)});
  }
  changed_.notify_all();
}

void Edge::post_urgent(Bytes frame) {
  {
    const Lock lock(mutex_);
    urgent_.push_back(std::move(frame));
  }
  changed_.notify_all();
}

void Edge::post_waiting(const Call& call) {
  post_urgent(frame_of(Kind::waiting, call, {}));
}

void Edge::post_interrupt(std::uint64_t fold) {
  post_urgent(frame_of(Kind::interrupt, fold, {}));
}

void Edge::post_failure(const Error& failure) {
  {
    const Lock lock(mutex_);
    letters_.clear();
  }
  post_urgent(frame_of(Kind::failure, 0, encode_error(failure)));
}

void Edge::post_farewell() {
  {
    const Lock lock(mutex_);
    farewell_ = true;
    writing_ = true;  // until it is said
  }
  changed_.notify_all();
}

bool Edge::quiet() const {
  const Lock lock(mutex_);
  return ended_ || (urgent_.empty() && letters_.empty() && !writing_);
}

Pulse Edge::last_pulse() const {
  const Lock lock(mutex_);
  return pulse_;
}

void Edge::write_until_farewell() {
  Lock lock(mutex_);
  const auto something = [this] {
    return ended_ || farewell_ || !urgent_.empty() || !letters_.empty();
  };
  while (true) {
    const bool due = changed_.wait_for(lock, beat_, something);
    if (ended_) return;
    if (!due) {
      write_beat(lock);
    } else if (!urgent_.empty()) {
      write_urgent(lock);
    } else if (!letters_.empty()) {
      write_letter(lock);
    } else {
      lock.unlock();
      write_frame(frame_of(Kind::farewell, 0, {}));
      return;
    }
    if (!urgent_.empty() || !letters_.empty()) continue;
    lock.unlock();
    owner_.all_sent();
    lock.lock();
  }
}

void Edge::write_frame(const Bytes& frame) {
  const std::span<const std::byte> bytes(frame);
  wire_->send(bytes.first(kFrame));
  if (bytes.size() > kFrame) wire_->send(bytes.subspan(kFrame));
}

void Edge::write_urgent(Lock& lock) {
  while (!urgent_.empty()) {
    const Bytes frame = std::move(urgent_.front());
    urgent_.pop_front();
    writing_ = true;
    lock.unlock();
    write_frame(frame);
    lock.lock();
    writing_ = farewell_;
  }
}

// Others take this letter off the queue when they drop it: then nobody wants the rest of it.
void Edge::write_letter(Lock& lock) {
  const Outgoing letter = letters_.front();
  const auto write_unlocked = [&](const auto& write) {
    lock.unlock();
    write();
    lock.lock();
    write_urgent(lock);
  };
  write_unlocked([&] { write_frame(frame_of(Kind::letter, letter.call, *letter.content)); });
  const std::size_t size = fits(letter.call, *letter.content) ? 0 : letter.content->size();
  for (std::size_t at = 0; at < size && !letters_.empty();) {
    const auto part = std::span(*letter.content).subspan(at, std::min(kPart, size - at));
    write_unlocked([&] {
      Bytes frame = frame_of(Kind::part, 0, {});
      store_le(frame.data() + kSizeAt, narrow<std::uint32_t>(part.size()));
      write_frame(frame);
      wire_->send(part);
    });
    at += part.size();
  }
  if (!letters_.empty()) letters_.pop_front();
}

void Edge::write_beat(Lock& lock) {
  lock.unlock();
  const Pulse pulse = owner_.pulse();
  Bytes awaited;
  append_le(awaited, static_cast<std::int32_t>(pulse.awaited));
  write_frame(frame_of(Kind::beat, pulse.progress, awaited));
  lock.lock();
}

void Edge::read_until_farewell() {
  while (read_frame()) continue;
}

bool Edge::read_frame() {
  Bytes frame(kFrame);
  wire_->receive(frame);
  last_heard_ = Clock::now();
  const auto kind = static_cast<Kind>(frame[0]);
  const auto number = load_le<std::uint64_t>(frame.data() + kNumberAt);
  const std::size_t size = load_le<std::uint32_t>(frame.data() + kSizeAt);
  if (kind == Kind::part) {
    read_part(size);
    return true;
  }
  if (size > kLongestPayload) throw nonsense();
  const Bytes payload = read_payload(frame);
  switch (kind) {
    case Kind::letter:
      read_letter(number, payload);
      return true;
    case Kind::waiting:
      owner_.peer_waits(peer_, letter_head_of(number, payload).call);
      return true;
    case Kind::beat: {
      if (payload.size() != sizeof(std::int32_t)) throw nonsense();
      const Lock lock(mutex_);
      pulse_ = {number, load_le<std::int32_t>(payload.data())};
      return true;
    }
    case Kind::interrupt:
      owner_.peer_interrupts(peer_, number);
      return true;
    case Kind::failure:
      owner_.peer_tells_failure(peer_, decode_error(payload));
      return true;
    case Kind::farewell:
      return false;
    default:
      throw nonsense();
  }
}

Bytes Edge::read_payload(std::span<const std::byte> frame) {
  Bytes payload(load_le<std::uint32_t>(frame.data() + kSizeAt));
  if (payload.size() > kRoom) {
    wire_->receive(payload);
  } else {
    std::ranges::copy(frame.subspan(kHead, payload.size()), payload.begin());
  }
  return payload;
}

void Edge::read_letter(std::uint64_t number, std::span<const std::byte> payload) {
  LetterHead head = letter_head_of(number, payload);
  incoming_ = {std::move(head.call), Bytes(head.size)};
  filled_ = head.begin.size();
  std::ranges::copy(head.begin, incoming_.content.begin());
  parts_follow_ = filled_ < incoming_.content.size();
  if (!parts_follow_) owner_.letter_came(peer_, std::exchange(incoming_, {}));
}

void Edge::read_part(std::size_t size) {
  if (!parts_follow_ || size == 0 || size > incoming_.content.size() - filled_) throw nonsense();
  wire_->receive(std::span(incoming_.content).subspan(filled_, size));
  last_heard_ = Clock::now();
  filled_ += size;
  parts_follow_ = filled_ < incoming_.content.size();
  if (!parts_follow_) owner_.letter_came(peer_, std::exchange(incoming_, {}));
}

}  // namespace tessera
