// What a writer process keeps, read by another host: over loopback here.
#include "storage/arena/peer.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/parallel.h"
#include "conformance/errors.h"
#include "storage/arena/peer_testing.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;

TEST_F(Peer, AnAddressIsALine) {
  const ArenaServer server;
  EXPECT_EQ(peer_address_from_text(to_text(server.address())), server.address());
  const std::string token(64, '0');
  EXPECT_EQ(peer_address_from_text("::1 65535 " + token).host, "::1");
  for (const std::string& wrong :
       {std::string(), std::string("10.0.0.1"), std::string("10.0.0.1 80"), "host 80 " + token,
        "10.0.0.1 0 " + token, "10.0.0.1 65536 " + token, "10.0.0.1 -1 " + token,
        "10.0.0.1 8x " + token, "10.0.0.1  80 " + token, "10.0.0.1 80 " + token + "0",
        "10.0.0.1 80 " + token + "\n", "10.0.0.1 80 " + std::string(64, 'G')})
    EXPECT_EQ(code_of([&] { (void)peer_address_from_text(wrong); }), ErrorCode::corrupt) << wrong;
}

TEST_F(Peer, TheInterfaceIsTheNamedOne) {
  EXPECT_EQ(ArenaServer().address().host, "127.0.0.1");
  EXPECT_THAT(ArenaServer().interface(), HasSubstr("lo (TESSERA_ARENA_IFNAME)"));
  ::setenv("GLOO_SOCKET_IFNAME", "nonexistent", 1);
  EXPECT_EQ(ArenaServer().address().host, "127.0.0.1");
  ::setenv("TESSERA_ARENA_IFNAME", "", 1);
  const Error error = error_of([] { const ArenaServer server; });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_THAT(error.what(), HasSubstr("'nonexistent' of GLOO_SOCKET_IFNAME"));
  ::setenv("GLOO_SOCKET_IFNAME", "lo,nonexistent", 1);
  EXPECT_THAT(ArenaServer().interface(), HasSubstr("lo (GLOO_SOCKET_IFNAME)"));
  ::unsetenv("GLOO_SOCKET_IFNAME");
  const ArenaServer unnamed;
  EXPECT_FALSE(unnamed.interface().empty());
  EXPECT_EQ(unnamed.address().token.size(), 64U);
  const RemoteArena reader(unnamed.address());
}

TEST_F(Peer, APartIsReadAndCopied) {
  ArenaServer server;
  const RemoteArena remote(server.address());
  CopiedPart copy;
  std::uint64_t number = 0;
  for (const std::size_t size :
       {std::size_t{1}, kLarge, std::size_t{0}, (std::size_t{8} << 20U) + 1}) {
    const Kept kept(content(size, size), ++number);
    server.serve(kept.part);
    const KeptPart part = remote.next_part("0123abcd", number - 1).value();
    EXPECT_EQ(part.place, kept.part.place);
    EXPECT_EQ(std::tuple(part.writer, part.number, part.rank, part.size, part.trainer),
              std::tuple("0123abcd", number, 3, 4, "host 7 9"));
    EXPECT_EQ(part.process, kept.part.process);
    const auto source = remote.open(part, "rank3.arena");
    EXPECT_EQ(read_whole(*source), kept.arena);
    EXPECT_EQ(code_of([&] {
                Bytes more(size + 1);
                source->read_at(0, more);
              }),
              ErrorCode::incomplete);
    EXPECT_EQ(code_of([&] { (void)remote.open(part, "rank4.arena"); }), ErrorCode::not_found);
    const CopyOutcome outcome = copy_part(remote, part, copy);
    EXPECT_EQ(outcome.bytes, size + kept.tree.size() + kept.digests.size());
    ASSERT_TRUE(copy.part());
    EXPECT_EQ(copy.part()->place, kept.part.place);
    EXPECT_EQ(read_memory(copy.part()->objects.at(0)), kept.tree);
    EXPECT_EQ(read_memory(copy.part()->objects.at(1)), kept.arena);
    EXPECT_EQ(read_memory(copy.part()->objects.at(2)), kept.digests);
  }
}

// The copy is a part as any other: a second host reads it.
TEST_F(Peer, ACopyIsServedOn) {
  const Kept kept(content(3'000'000, 1));
  ArenaServer first, second;
  first.serve(kept.part);
  const RemoteArena remote(first.address());
  CopiedPart copy;
  (void)copy_part(remote, remote.next_part("", 0).value(), copy);
  second.serve(*copy.part());
  const RemoteArena further(second.address());
  EXPECT_EQ(read_whole(*further.open(further.next_part("", 0).value(), "rank3.arena")), kept.arena);
}

TEST_F(Peer, SeveralReadAtOnce) {
  const Kept kept(content(kLarge, 2));
  ArenaServer server;
  server.serve(kept.part);
  parallel_for(2, 2, [&](std::size_t) {
    const RemoteArena remote(server.address());
    const KeptPart part = remote.next_part("", 0).value();
    const auto source = remote.open(part, "rank3.arena");
    parallel_for(6, 7, [&](std::size_t i) {
      Bytes bytes(kLarge / 7);
      source->read_at(i * bytes.size(), bytes);
      EXPECT_EQ(std::memcmp(bytes.data(), kept.arena.data() + i * bytes.size(), bytes.size()), 0);
    });
    Bytes near(10), far(9'000'000);
    const std::vector<ReadRange> ranges{{60'000'000, far}, {5, near}, {0, {}}};
    source->read_ranges(ranges);
    EXPECT_EQ(std::memcmp(near.data(), kept.arena.data() + 5, near.size()), 0);
    EXPECT_EQ(std::memcmp(far.data(), kept.arena.data() + 60'000'000, far.size()), 0);
  });
}

// A server that takes one connection serves the threads of one reader, one after another.
TEST_F(Peer, AServerMayTakeFewConnections) {
  const Kept kept(content(1'000'000, 3));
  ArenaServer server({.most_connections = 1});
  server.serve(kept.part);
  {
    const RemoteArena remote(server.address());
    const auto source = remote.open(remote.next_part("", 0).value(), "rank3.arena");
    parallel_for(4, 16, [&](std::size_t) { EXPECT_EQ(read_whole(*source), kept.arena); });
    EXPECT_EQ(code_of([&] { const RemoteArena other(server.address(), kSoon); }),
              ErrorCode::peer_failed);
  }
  const RemoteArena later(server.address());
  EXPECT_TRUE(later.next_part("", 0));
}

TEST_F(Peer, WhatIsServedNoMoreIsNotFound) {
  const Kept first(content(kLarge, 8)), second(content(1000, 9), 2);
  ArenaServer server;
  server.serve(first.part);
  const RemoteArena remote(server.address());
  const KeptPart part = remote.next_part("", 0).value();
  const auto source = remote.open(part, "rank3.arena");
  Bytes some(1000);
  source->read_at(0, some);
  remote.require_served(part);
  std::thread reader([&] {
    try {
      EXPECT_EQ(read_whole(*source), first.arena);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::not_found);
    }
  });
  server.serve(second.part);
  reader.join();
  const auto gone = [&](const auto& call) { EXPECT_EQ(code_of(call), ErrorCode::not_found); };
  gone([&] { source->read_at(0, some); });
  gone([&] { remote.require_served(part); });
  CopiedPart copy;
  gone([&] { (void)copy_part(remote, part, copy); });
  EXPECT_FALSE(copy.part());
  const KeptPart other = remote.next_part(part.writer, part.number).value();
  (void)copy_part(remote, other, copy);
  EXPECT_TRUE(copy.part());
  server.serve_nothing();
  gone([&] { (void)copy_part(remote, other, copy); });
  EXPECT_FALSE(copy.part());
}

// A trainer that stages its next save writes to the memory before the writer process hears of it.
TEST_F(Peer, ACopyThatDiffersFromItsDigestsIsNone) {
  for (const std::size_t object : {0, 1, 2}) {
    const Kept kept(content(5'000'000, 10));
    const std::byte other{0x5a};
    ASSERT_EQ(::pwrite(kept.memory.at(object).get(), &other, 1, 17), 1);
    ArenaServer server;
    server.serve(kept.part);
    const RemoteArena remote(server.address());
    CopiedPart copy;
    EXPECT_EQ(code_of([&] { (void)copy_part(remote, remote.next_part("", 0).value(), copy); }),
              ErrorCode::corrupt);
    EXPECT_FALSE(copy.part());
  }
  Kept kept(content(5'000'000, 10));
  kept.part.objects.at(2).bytes -= 8;
  ArenaServer server;
  server.serve(kept.part);
  const RemoteArena remote(server.address());
  CopiedPart copy;
  EXPECT_EQ(code_of([&] { (void)copy_part(remote, remote.next_part("", 0).value(), copy); }),
            ErrorCode::corrupt);
}

TEST_F(Peer, AServerThatHasGoneIsNamed) {
  const Kept kept(content(kLarge, 11));
  auto server = std::make_unique<ArenaServer>();
  server->serve(kept.part);
  const PeerAddress address = server->address();
  const RemoteArena remote(address);
  const auto source = remote.open(remote.next_part("", 0).value(), "rank3.arena");
  std::atomic<bool> reads = false;
  std::thread reader([&] {
    const Error error = error_of([&] {
      while (true) {
        (void)read_whole(*source);
        reads = true;
      }
    });
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:" + std::to_string(address.port)));
  });
  std::thread waiter([&] {
    EXPECT_EQ(code_of([&] { (void)remote.next_part(kept.part.writer, kept.part.number); }),
              ErrorCode::peer_failed);
  });
  while (!reads) std::this_thread::sleep_for(1ms);
  server.reset();
  reader.join();
  waiter.join();
  EXPECT_EQ(code_of([&] { const RemoteArena other(address); }), ErrorCode::peer_failed);
}

// Neither the reader's silence between its calls nor the server's while there is nothing new
// counts.
TEST_F(Peer, SignsOfLifeKeepConnections) {
  constexpr std::chrono::milliseconds kSilence = 1s;
  const Kept kept(content(1000, 14)), next(content(1000, 15), 2);
  ArenaServer server({.silence = kSilence, .most_connections = 1});
  server.serve(kept.part);
  const RemoteArena remote(server.address(), kSilence);
  EXPECT_EQ(remote.next_part("", 0).value().number, 1U);
  std::this_thread::sleep_for(2500ms);
  std::thread server_later([&] {
    std::this_thread::sleep_for(2500ms);
    server.serve(next.part);
  });
  EXPECT_EQ(remote.next_part(kept.part.writer, 1).value().number, 2U);
  server_later.join();
}

TEST_F(Peer, AWaitForTheNextPartEndsByTheStop) {
  ArenaServer server;
  const RemoteArena remote(server.address());
  std::stop_source stop;
  std::thread stopper([&] {
    std::this_thread::sleep_for(kSoon);
    stop.request_stop();
  });
  EXPECT_EQ(remote.next_part("", 0, stop.get_token()), std::nullopt);
  stopper.join();
  const Kept kept(content(2'000'000, 16));
  server.serve(kept.part);
  const KeptPart part = remote.next_part("", 0).value();
  CopiedPart copy;
  EXPECT_EQ(code_of([&] { (void)copy_part(remote, part, copy, stop.get_token()); }),
            ErrorCode::cancelled);
  EXPECT_FALSE(copy.part());
}

}  // namespace
}  // namespace tessera
