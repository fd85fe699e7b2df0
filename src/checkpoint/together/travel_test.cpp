#include "checkpoint/together/travel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "checkpoint/together/testing.h"

namespace tessera {
namespace {

using namespace testing_support;

// No rank has more than its part of a round in memory, however much it has to send.
TEST(Travel, AnOutboxHasItsRoomAndNoMore) {
  constexpr std::size_t kRoom = 4096;
  Outbox outbox(kRoom);
  const auto sink = outbox.sink({1, 7}, "a file");
  std::jthread writer([&] {
    const std::vector<std::byte> bytes(10 * kRoom, std::byte{5});
    sink->write_at(0, bytes);
    sink->write_at(bytes.size(), std::span(bytes).first(3));
    outbox.end(nullptr);
  });
  std::uint64_t received = 0;
  for (bool is_last = false; !is_last;) {
    const Outbox::Batch batch = outbox.take();
    EXPECT_LE(batch.bytes.size(), 2 * kRoom + 64);
    is_last = batch.is_last;
    for (MessageReader message(batch.bytes); !message.at_end();) {
      EXPECT_EQ(message.count(), 1U);
      EXPECT_EQ(message.count(), 7U);
      EXPECT_EQ(message.count(), received);
      received += message.block().size();
    }
  }
  EXPECT_EQ(received, 10 * kRoom + 3);
}

// Ranks send to others until one of them fails, as sender or as receiver, or is asked to stop: the
// others stop, too, and nobody waits for room.
TEST(Travel, AFailureOfAnyRankEndsIt) {
  enum class Fails { sender, receiver, stopped };
  for (const Fails fails : {Fails::sender, Fails::receiver, Fails::stopped}) {
    for (const bool to_rank_zero : {false, true}) {
      std::stop_source stop;
      std::atomic<std::uint64_t> received = 0;
      const auto exchange = [&](Group& group) {
        Travel how;
        how.to_rank_zero = to_rank_zero;
        if (group.rank() == 2) how.stop = stop.get_token();
        how.send = [&](Outbox& outbox) {
          const int to = to_rank_zero ? 0 : (group.rank() + 1) % 3;
          const std::vector<std::byte> bytes(1 << 20);
          for (std::uint64_t at = 0; at < 64; ++at) {
            if (at == 20 && fails == Fails::sender && group.rank() == 1)
              throw Error(ErrorCode::io, "cannot be read");
            if (at == 20 && fails == Fails::stopped) stop.request_stop();
            outbox.sink({to, 0}, "a file")->write_at(at << 20, bytes);
          }
        };
        how.receive = [&](std::uint32_t, std::uint64_t, ByteView bytes) {
          received += bytes.size();
          if (received > (30U << 20) && fails == Fails::receiver && group.rank() == 0)
            throw Error(ErrorCode::out_of_space, "cannot be written");
        };
        travel(group, how);
      };
      const ErrorCode expected = fails == Fails::sender     ? ErrorCode::io
                                 : fails == Fails::receiver ? ErrorCode::out_of_space
                                                            : ErrorCode::cancelled;
      EXPECT_EQ(code_of([&] { run_ranks(3, exchange); }), expected);
      EXPECT_LT(received, 3U * 64U << 20);
    }
  }
}

}  // namespace
}  // namespace tessera
