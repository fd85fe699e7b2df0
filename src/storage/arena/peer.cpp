#include "storage/arena/peer.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "io/source.h"
#include "storage/arena/peer_wire.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using peer::Connection;
using peer::FrameKind;
using peer::WaitEnd;

bool is_token(std::string_view text) {
  return text.size() == peer::kTokenDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string shown(const PeerAddress& address) {
  const bool has_colons = address.host.find(':') != std::string::npos;
  const std::string host = has_colons ? "[" + address.host + "]" : address.host;
  return host + ":" + std::to_string(address.port);
}

// To whom the server is known, and which knows the token.
std::unique_ptr<Connection> connection_to(const PeerAddress& address,
                                          std::chrono::milliseconds silence, const WaitEnd& end) {
  const auto endpoint = peer::endpoint_of(address.host, address.port);
  if (!endpoint || !is_token(address.token)) {
    throw Error(ErrorCode::invalid_argument, "no address of a server of snapshots")
        .at_path(shown(address));
  }
  Fd socket(::socket(endpoint->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno(errno, "socket", shown(address));
  auto made = std::make_unique<Connection>(std::move(socket), shown(address), silence);
  if (::connect(made->socket(), endpoint->raw(), endpoint->size) != 0) {
    if (errno != EINPROGRESS) made->refuse_call("connect", errno);
    made->await(POLLOUT, end);
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(made->socket(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) made->refuse_call("connect", error);
  }
  const std::string hello = std::string(peer::kGreeting) + address.token;
  made->send(FrameKind::hello, std::as_bytes(std::span(hello)), end);
  const auto head = made->receive_head(end);
  if (!head) {
    throw Error(ErrorCode::unsafe,
                "the server ends the connection at once: the token is that of another")
        .at_path(made->name());
  }
  if (head->kind != FrameKind::welcome)
    throw Error(ErrorCode::corrupt, "no server of snapshots answers").at_path(made->name());
  return made;
}

}  // namespace

// Connections to one server. One at least stays open while nobody uses it, so that the server hears
// of this process.
class PeerLanes {
 public:
  // One connection does not fill a fast network.
  static constexpr int kMostReaders = 4;

  PeerLanes(const PeerAddress& address, std::chrono::milliseconds silence, std::stop_token stop)
      : address_(address), silence_(silence), name_(shown(address)) {
    idle_.push_back(connection_to(address_, silence_, {.stop = std::move(stop)}));
    keeper_ = std::make_unique<std::thread>([this] { keep_heard(); });
  }
  ~PeerLanes() {
    if (!made_here_) {
      (void)keeper_.release();  // a child of fork() has no such thread
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    ending_.notify_all();
    keeper_->join();
  }
  PeerLanes(const PeerLanes&) = delete;
  PeerLanes& operator=(const PeerLanes&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // Empty ranges are asked for, too.
  void read(const KeptPart& part, const std::string& object, std::span<const ReadRange> ranges,
            const WaitEnd& end);
  [[nodiscard]] KeptPart next(const std::string& writer, std::uint64_t number, const WaitEnd& end);

 private:
  // One of those that may read at the same time.
  class Turn {
   public:
    Turn(PeerLanes& lanes, const WaitEnd& end) : lanes_(lanes) {
      constexpr std::chrono::milliseconds kBetweenLooks{50};
      std::unique_lock lock(lanes_.mutex_);
      while (lanes_.readers_ >= lanes_.most_readers_) {
        require_going_on(end.stop);
        if (HeedStop::is_requested()) throw_cancelled();
        (void)lanes_.has_turn_.wait_for(lock, kBetweenLooks);
      }
      ++lanes_.readers_;
    }
    ~Turn() {
      const std::lock_guard lock(lanes_.mutex_);
      --lanes_.readers_;
      if (is_connected_) --lanes_.connected_;
      lanes_.has_turn_.notify_one();
    }
    // Whoever has a turn and no connection yet makes one.
    void note_connection() {
      const std::lock_guard lock(lanes_.mutex_);
      is_connected_ = true;
      ++lanes_.connected_;
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    PeerLanes& lanes_;
    bool is_connected_ = false;
  };

  // Null: there is none.
  std::unique_ptr<Connection> take_idle() {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      auto last = std::move(idle_.back());
      idle_.pop_back();
      if (!last->has_input()) return last;  // else it has ended, since nothing was asked
    }
    return nullptr;
  }
  void give_back(std::unique_ptr<Connection> connection) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(connection));
  }
  void require_made_here() const {
    if (made_here_) return;
    throw Error(ErrorCode::invalid_argument,
                "this process was forked, and the connection is its parent's")
        .at_path(name_);
  }
  // A server that takes no more connections is read by those that there are.
  std::unique_ptr<Connection> take_to_read(std::optional<Turn>& turn, const WaitEnd& end);
  void ask(const Connection& of, const KeptPart& part, const std::string& object,
           const ReadRange& range, const WaitEnd& end) const;
  void keep_heard();

  const PeerAddress address_;
  const std::chrono::milliseconds silence_;
  const std::string name_;
  const MadeHere made_here_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable has_turn_, ending_;
  int readers_ = 0, most_readers_ = kMostReaders;
  int connected_ = 0;  // of these readers
  bool is_ending_ = false;
  std::vector<std::unique_ptr<Connection>> idle_;
  std::unique_ptr<std::thread> keeper_;
};

std::unique_ptr<Connection> PeerLanes::take_to_read(std::optional<Turn>& turn, const WaitEnd& end) {
  constexpr std::chrono::milliseconds kForOneMore{2'000};
  const auto others = [this] {
    const std::lock_guard lock(mutex_);
    return connected_ + static_cast<int>(idle_.size());
  };
  while (true) {
    turn.emplace(*this, end);
    auto found = take_idle();
    const bool is_one_more = others() > 0;
    try {
      if (!found) {
        WaitEnd soon = end;
        if (is_one_more) soon.at = std::chrono::steady_clock::now() + kForOneMore;
        found = connection_to(address_, silence_, soon);
      }
      turn->note_connection();
      return found;
    } catch (const Error& error) {
      const int have = others();
      if (!is_one_more || have == 0 || error.code() != ErrorCode::peer_failed) throw;
      const std::lock_guard lock(mutex_);
      most_readers_ = std::min(most_readers_, have);
    }
    turn.reset();
  }
}

void PeerLanes::ask(const Connection& of, const KeptPart& part, const std::string& object,
                    const ReadRange& range, const WaitEnd& end) const {
  peer::Packer question;
  question.text(part.writer).number(part.number).text(object);
  question.number(range.offset).number(range.out.size());
  of.send(FrameKind::read, question.bytes(), end);
}

void PeerLanes::read(const KeptPart& part, const std::string& object,
                     std::span<const ReadRange> ranges, const WaitEnd& end) {
  constexpr std::size_t kAhead = 4;  // questions, so that the server always has one
  require_made_here();
  std::vector<ReadRange> pieces;
  for (const ReadRange& range : ranges) {
    std::size_t done = 0;
    do {
      const auto size = std::min<std::size_t>(peer::kMostRead, range.out.size() - done);
      pieces.push_back({range.offset + done, range.out.subspan(done, size)});
      done += size;
    } while (done < range.out.size());
  }
  std::optional<Turn> turn;
  auto connection = take_to_read(turn, end);
  std::size_t asked = 0;
  for (std::size_t done = 0; done < pieces.size(); ++done) {
    require_going_on(end.stop);
    if (HeedStop::is_requested()) throw_cancelled();
    for (; asked < std::min(pieces.size(), done + kAhead); ++asked)
      ask(*connection, part, object, pieces[asked], end);
    const auto head = connection->receive_head(end);
    if (!head) connection->refuse("has ended the connection");
    if (head->kind == FrameKind::gone) {
      throw Error(ErrorCode::not_found, "the process that kept this in memory has given it back")
          .at_path(name_ + "/" + object);
    }
    const auto out = pieces[done].out;
    if (head->kind != FrameKind::data || head->size != out.size()) {
      throw Error(ErrorCode::corrupt, "the server of snapshots answers what nobody asked")
          .at_path(name_ + "/" + object);
    }
    connection->receive(out, end);
  }
  give_back(std::move(connection));
}

KeptPart PeerLanes::next(const std::string& writer, std::uint64_t number, const WaitEnd& end) {
  require_made_here();
  auto connection = take_idle();
  if (!connection) connection = connection_to(address_, silence_, end);
  connection->send(FrameKind::next, peer::Packer().text(writer).number(number).bytes(), end);
  while (true) {
    require_going_on(end.stop);
    const auto head = connection->receive_head(end);
    if (!head) connection->refuse("has ended the connection");
    if (head->kind == FrameKind::sign && head->size == 0) {
      connection->send(FrameKind::sign, {}, end);
      continue;
    }
    if (head->kind != FrameKind::part)
      throw Error(ErrorCode::corrupt, "the server of snapshots names no part").at_path(name_);
    KeptPart part = peer::unpacked_part(connection->receive(head->size, end));
    give_back(std::move(connection));
    return part;
  }
}

// Connections that nobody uses: one says that this process lives, the others end.
void PeerLanes::keep_heard() {
  std::unique_lock lock(mutex_);
  while (!ending_.wait_for(lock, silence_ / 4, [this] { return is_ending_; })) {
    if (idle_.size() > 1) idle_.resize(1);
    std::erase_if(idle_, [](const auto& one) { return !one->send_sign(); });
  }
}

namespace {

class PeerSource final : public ByteSource {
 public:
  PeerSource(std::shared_ptr<PeerLanes> lanes, KeptPart part, const KeptObject& object)
      : lanes_(std::move(lanes)),
        part_(std::move(part)),
        object_(object.name),
        size_(object.bytes),
        name_(lanes_->name() + "/" + object_) {}
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    const ReadRange range{offset, out};
    read_ranges(std::span(&range, 1));
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    std::vector<ReadRange> asked;
    for (const ReadRange& range : ranges) {
      require_range(*this, range.offset, range.out.size());
      if (!range.out.empty()) asked.push_back(range);
    }
    if (!asked.empty()) lanes_->read(part_, object_, asked, {});
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::string version() const override {
    return part_.writer + "-" + std::to_string(part_.number);
  }
  // What a network of 1 GB/s carries while one question and its answer are under way.
  [[nodiscard]] std::uint64_t request_cost() const override { return 128U << 10U; }

 private:
  const std::shared_ptr<PeerLanes> lanes_;  // sources outlive the RemoteArena
  const KeptPart part_;
  const std::string object_;
  const std::uint64_t size_;
  const std::string name_;
};

}  // namespace

std::string to_text(const PeerAddress& address) {
  return address.host + " " + std::to_string(address.port) + " " + address.token;
}

PeerAddress peer_address_from_text(const std::string& text) {
  const auto blank = text.find(' '), second = text.find(' ', blank + 1);
  if (blank != std::string::npos && second != std::string::npos) {
    PeerAddress found{text.substr(0, blank), 0, text.substr(second + 1)};
    const char* const end = text.data() + second;
    const auto parsed = std::from_chars(text.data() + blank + 1, end, found.port);
    const bool is_port = parsed.ec == std::errc() && parsed.ptr == end && found.port != 0;
    if (is_port && peer::endpoint_of(found.host, found.port) && is_token(found.token)) return found;
  }
  throw Error(ErrorCode::corrupt, "no address of a server of snapshots");
}

RemoteArena::RemoteArena(const PeerAddress& address, std::chrono::milliseconds silence,
                         const std::stop_token& stop)
    : lanes_(std::make_shared<PeerLanes>(address, silence, stop)) {}

std::optional<KeptPart> RemoteArena::next_part(const std::string& writer, std::uint64_t number,
                                               const std::stop_token& stop) const {
  try {
    return lanes_->next(writer, number, {.stop = stop});
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled && stop.stop_requested()) return std::nullopt;
    throw;
  }
}

std::shared_ptr<ByteSource> RemoteArena::open(const KeptPart& part, const std::string& name) const {
  const auto found = std::ranges::find(part.objects, name, &KeptObject::name);
  if (found != part.objects.end()) return std::make_shared<PeerSource>(lanes_, part, *found);
  throw Error(ErrorCode::not_found, "there is no such object").at_path(lanes_->name() + "/" + name);
}

void RemoteArena::require_served(const KeptPart& part, const std::stop_token& stop) const {
  if (part.objects.empty()) return;
  const ReadRange nothing{};
  lanes_->read(part, part.objects.front().name, std::span(&nothing, 1), {.stop = stop});
}

const std::string& RemoteArena::name() const noexcept {
  return lanes_->name();
}

}  // namespace tessera
