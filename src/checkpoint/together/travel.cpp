#include "checkpoint/together/travel.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/parallel.h"
#include "comm/confer.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kTravelling = "sending parts of a checkpoint";
constexpr std::size_t kRound = 8 << 20;  // bytes of all ranks that are under way at once, about
constexpr std::size_t kLeast = 1 << 10, kMost = 4 << 20;  // of one rank

class TravellingSink final : public ByteSink {
 public:
  TravellingSink(Outbox& outbox, const Addressee& to, std::string name)
      : outbox_(outbox), to_(to), name_(std::move(name)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override { outbox_.put(to_, offset, bytes); }
  void commit() override {}  // the maker makes it durable
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  Outbox& outbox_;
  const Addressee to_;
  const std::string name_;
};

// Fills an outbox on a thread of its own, which its end stops and joins.
class Sender {
 public:
  Sender(std::size_t room, const std::function<void(Outbox&)>& send) : outbox_(room) {
    if (!send) {
      outbox_.end(nullptr);
      return;
    }
    thread_ = std::jthread([this, &send] {
      std::exception_ptr failure;
      try {
        send(outbox_);
      } catch (...) {
        failure = std::current_exception();
      }
      outbox_.end(failure);
    });
  }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;
  ~Sender() { outbox_.close(); }

  [[nodiscard]] Outbox::Batch take() { return outbox_.take(); }

 private:
  Outbox outbox_;
  std::jthread thread_;  // last: it uses the outbox
};

// The message of a rank, beside those of the others: whether it sends more, and what it sends now.
Bytes encode(const Outbox::Batch& batch) {
  return MessageWriter().count(batch.is_last ? 0 : 1).block(batch.bytes).take();
}

struct Sorted {
  std::vector<Bytes> by_maker;
  bool is_last = true;
};

Sorted sorted(const Bytes& all, int ranks) {
  std::vector<MessageWriter> by_maker(static_cast<std::size_t>(ranks));
  Sorted result;
  for (MessageReader message(all); !message.at_end();) {
    if (message.count() == 1) result.is_last = false;
    for (MessageReader batch(message.block()); !batch.at_end();) {
      MessageWriter& to = by_maker.at(batch.count());
      to.count(batch.count()).count(batch.count());
      to.block(batch.block());
    }
  }
  for (MessageWriter& one : by_maker) result.by_maker.push_back(one.take());
  return result;
}

void receive_all(const Travel& how, const Bytes& arrived) {
  for (MessageReader message(arrived); !message.at_end();) {
    const auto file = static_cast<std::uint32_t>(message.count());
    const std::uint64_t offset = message.count();
    how.receive(file, offset, message.block());
  }
}

}  // namespace

std::unique_ptr<ByteSink> Outbox::sink(const Addressee& to, std::string name) {
  return std::make_unique<TravellingSink>(*this, to, std::move(name));
}

void Outbox::put(const Addressee& to, std::uint64_t offset, ByteView bytes) {
  while (!bytes.empty()) {
    const ByteView some = bytes.first(std::min(bytes.size(), room_));
    put_some(to, offset, some);
    offset += some.size();
    bytes = bytes.subspan(some.size());
  }
}

void Outbox::put_some(const Addressee& to, std::uint64_t offset, ByteView bytes) {
  std::unique_lock lock(mutex_);
  wait_for_change(changed_, lock, [this] { return is_closed_ || pending_.size() < room_; });
  if (is_closed_) throw Error(ErrorCode::cancelled, "nobody takes what is to be sent");
  pending_.count(static_cast<std::uint64_t>(to.maker)).count(to.file).count(offset);
  pending_.block(bytes);
  changed_.notify_all();
}

void Outbox::end(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
  has_ended_ = true;
  changed_.notify_all();
}

void Outbox::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

Outbox::Batch Outbox::take() {
  std::unique_lock lock(mutex_);
  wait_for_change(changed_, lock, [this] { return has_ended_ || pending_.size() >= room_; });
  if (failure_) std::rethrow_exception(failure_);
  Batch batch{pending_.take(), has_ended_};
  pending_ = {};
  changed_.notify_all();
  return batch;
}

void travel(Group& group, const Travel& how) {
  const std::size_t ranks = static_cast<std::size_t>(group.size());
  Sender sender(std::clamp(kRound / ranks, kLeast, kMost), how.send);
  Bytes arrived;
  for (bool is_last = false; !is_last;) {
    std::vector<Bytes> by_maker;  // rank 0
    const auto contribute = [&] {
      require_going_on(how.stop);
      receive_all(how, arrived);
      return encode(sender.take());
    };
    const auto conclude = [&](const Bytes& all) {
      Sorted round = sorted(all, group.size());
      by_maker = std::move(round.by_maker);
      return MessageWriter().count(round.is_last ? 1 : 0).take();
    };
    is_last =
        MessageReader(confer(group, kTravelling, {contribute, side_by_side, conclude})).count() ==
        1;
    if (how.to_rank_zero) {
      arrived = by_maker.empty() ? Bytes() : std::move(by_maker.front());
    } else {
      arrived = group.scatter(by_maker);
    }
  }
  agree(group, kTravelling, [&] { receive_all(how, arrived); });
}

}  // namespace tessera
