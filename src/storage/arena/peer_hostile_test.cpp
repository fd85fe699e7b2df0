// Peers that do not know the token, send what is no frame, say nothing or stop.
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

TEST_F(Peer, WhoDoesNotKnowTheTokenGetsNoAnswer) {
  const Kept kept(content(100, 4));
  ArenaServer server({.silence = kSoon});
  server.serve(kept.part);
  PeerAddress wrong = server.address();
  wrong.token.back() = wrong.token.back() == '0' ? '1' : '0';
  const Error error = error_of([&] { const RemoteArena remote(wrong); });
  EXPECT_EQ(error.code(), ErrorCode::unsafe);
  EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:" + std::to_string(wrong.port)));
  const std::string token = server.address().token;
  for (const Bytes& first : {Bytes(), hello_frame(token.substr(1)), hello_frame(token + "0"),
                             hello_frame(""), read_frame(kept.part, 0, 10), next_frame("", 0),
                             frame(FrameKind::sign), Bytes(1000, std::byte{255})}) {
    const RawReader reader(server.address());
    reader.send(first);
    EXPECT_EQ(reader.drain(), 0U);
  }
}

// What is no question ends the connection, and the next reader finds the server as it was.
TEST_F(Peer, AServerOutlivesWhatIsNoQuestion) {
  const Kept kept(content(100, 5));
  ArenaServer server;
  server.serve(kept.part);
  Bytes session = hello_frame(server.address().token);
  const std::size_t known = session.size();
  append(session, next_frame("", 0));
  append(session, read_frame(kept.part, 3, 50));
  append(session, frame(FrameKind::sign));
  append(session, read_frame(kept.part, 0, 100));
  std::mt19937 random(1);
  for (std::size_t at = 0; at < session.size(); ++at) {
    const RawReader cut(server.address()), damaged(server.address());
    cut.send({session.begin(), session.begin() + static_cast<std::ptrdiff_t>(at)});
    cut.end_sending();
    const std::size_t got = cut.drain();
    if (at < known) {
      EXPECT_EQ(got, 0U) << at;
    }
    Bytes other = session;
    other[at] ^= static_cast<std::byte>(1 + random() % 255);
    damaged.send(other);
    damaged.end_sending();
    if (at < known) {
      EXPECT_EQ(damaged.drain(), 0U) << at;
    }
  }
  for (const auto& [offset, size] : {std::pair<std::uint64_t, std::uint64_t>(0, 101),
                                     {101, 0},
                                     {~0ULL, 1},
                                     {1, ~0ULL},
                                     {0, peer::kMostRead + 1ULL}}) {
    const RawReader reader(server.address());
    Bytes asked = hello_frame(server.address().token);
    append(asked, read_frame(kept.part, offset, size));
    reader.send(asked);
    EXPECT_EQ(reader.drain(), frame(FrameKind::welcome).size()) << offset << ' ' << size;
  }
  const RemoteArena remote(server.address());
  EXPECT_EQ(read_whole(*remote.open(remote.next_part("", 0).value(), "rank3.arena")), kept.arena);
}

std::vector<Bytes> good_answers(const Kept& kept) {
  return {frame(FrameKind::welcome), frame(FrameKind::part, peer::packed(kept.part)),
          frame(FrameKind::data, kept.arena)};
}

Bytes read_all_of(const PeerAddress& address, std::chrono::milliseconds silence = 20s) {
  const RemoteArena remote(address, silence);
  const KeptPart part = remote.next_part("", 0).value();
  const auto source = remote.open(part, "rank3.arena");
  Bytes bytes(std::min<std::uint64_t>(source->size(), 1U << 20U));
  source->read_at(0, bytes);
  return bytes;
}

TEST_F(Peer, AReaderNamesAServerThatEndsInBetween) {
  const Kept kept(content(100, 6));
  const auto answers = good_answers(kept);
  std::size_t all = 0;
  for (const Bytes& one : answers) all += one.size();
  for (std::size_t cut = 1; cut < all; ++cut) {
    // Who finds that nothing is under way connects again.
    if (cut == answers[0].size() + answers[1].size()) continue;
    const ScriptedServer server(answers, cut);
    const Error error = error_of([&] { (void)read_all_of(server.address()); });
    EXPECT_EQ(error.code(), ErrorCode::peer_failed) << cut;
    EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:" + std::to_string(server.address().port)));
  }
  EXPECT_EQ(read_all_of(ScriptedServer(answers).address()), kept.arena);
}

TEST_F(Peer, AReaderOutlivesWhatIsNoAnswer) {
  const Kept kept(content(100, 7));
  std::mt19937 random(2);
  const auto answers = good_answers(kept);
  for (std::size_t which = 0; which < answers.size(); ++which) {
    for (std::size_t at = 0; at < answers[which].size(); ++at) {
      auto damaged = answers;
      damaged[which][at] ^= static_cast<std::byte>(1 + random() % 255);
      const ScriptedServer server(damaged);
      try {
        EXPECT_LE(read_all_of(server.address(), kSoon).size(), 1U << 20U);
      } catch (const Error& error) {
        EXPECT_THAT(error.code(), testing::AnyOf(ErrorCode::corrupt, ErrorCode::peer_failed,
                                                 ErrorCode::not_found, ErrorCode::unsafe))
            << which << ' ' << at << ' ' << error.what();
      }
    }
  }
}

TEST_F(Peer, NoNumberOfAnAnswerIsBelieved) {
  const auto refused = [](const Bytes& second, std::vector<Bytes> more = {}) {
    std::vector<Bytes> answers{frame(FrameKind::welcome), second};
    answers.insert(answers.end(), more.begin(), more.end());
    const ScriptedServer server(answers);
    return code_of([&] { (void)read_all_of(server.address()); });
  };
  const auto part = [](const std::function<void(Packer&)>& end, std::uint64_t size = 4) {
    Packer packer;
    packer.text("/a").text("w").number(1).number(3).number(size);
    packer.number(0).number(0).number(0).text("");
    packer.text(same_host::to_text(same_host::this_process()));
    end(packer);
    return frame(FrameKind::part, packer.bytes());
  };
  const auto object = [](Packer& packer, const std::string& name, std::uint64_t bytes) {
    packer.number(1).text(name).number(4).number(bytes).number(0).number(0);
  };
  for (const std::uint64_t count : {17ULL, 1ULL << 40U, ~0ULL})
    EXPECT_EQ(refused(part([&](Packer& to) { to.number(count); })), ErrorCode::corrupt);
  for (const std::uint64_t size : {0ULL, 3ULL, 1ULL << 32U, ~0ULL})
    EXPECT_EQ(refused(part([](Packer& to) { to.number(0); }, size)), ErrorCode::corrupt);
  for (const std::uint64_t bytes : {(1ULL << 48U) + 1, ~0ULL}) {
    EXPECT_EQ(refused(part([&](Packer& to) { object(to, "rank3.arena", bytes); })),
              ErrorCode::corrupt);
  }
  for (const std::string name : {"", "..", "a/b", "a b", "a\nb"})
    EXPECT_EQ(refused(part([&](Packer& to) { object(to, name, 1); })), ErrorCode::corrupt);
  EXPECT_EQ(refused(part([](Packer& to) { to.number(0).number(0); })), ErrorCode::corrupt);
  Bytes huge = frame(FrameKind::part);
  std::fill(huge.begin() + 1, huge.end(), std::byte{255});
  EXPECT_EQ(refused(huge), ErrorCode::corrupt);
  const auto one = part([&](Packer& to) { object(to, "rank3.arena", 10); });
  for (const std::size_t bytes : {0U, 9U, 11U})
    EXPECT_EQ(refused(one, {frame(FrameKind::data, Bytes(bytes))}), ErrorCode::corrupt);
  EXPECT_EQ(refused(one, {frame(FrameKind::gone)}), ErrorCode::not_found);
  KeptPart outside;
  outside.writer = "../b";
  EXPECT_EQ(code_of([&] { (void)peer::packed(outside); }), ErrorCode::unsupported);
}

TEST_F(Peer, ASilentServerIsLost) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  auto endpoint = *peer::endpoint_of("127.0.0.1", 0);
  ASSERT_EQ(::bind(listener.get(), endpoint.raw(), endpoint.size), 0);
  ASSERT_EQ(::listen(listener.get(), 8), 0);
  ASSERT_EQ(::getsockname(listener.get(), endpoint.raw(), &endpoint.size), 0);
  const auto port = ntohs(reinterpret_cast<const sockaddr_in&>(endpoint.storage).sin_port);
  const PeerAddress address{"127.0.0.1", port, std::string(64, 'b')};
  EXPECT_EQ(code_of([&] { const RemoteArena remote(address, kSoon); }), ErrorCode::peer_failed);
  std::stop_source stop;
  std::thread stopper([&] {
    std::this_thread::sleep_for(kSoon);
    stop.request_stop();
  });
  EXPECT_EQ(code_of([&] { const RemoteArena remote(address, 600s, stop.get_token()); }),
            ErrorCode::cancelled);
  EXPECT_EQ(code_of([&] {
              const HeedStop heeding(stop.get_token());
              const RemoteArena remote(address, 600s);
            }),
            ErrorCode::cancelled);
  stopper.join();
}

// One that asks for much and reads nothing keeps nobody else, nor the end.
TEST_F(Peer, AReaderThatStopsKeepsNobody) {
  const Kept kept(content(kLarge, 12)), other(content(1000, 13), 2);
  Bytes asked;
  for (int i = 0; i < 8; ++i) append(asked, read_frame(kept.part, 0, peer::kMostRead));
  {
    ArenaServer server;  // silence is a minute
    server.serve(kept.part);
    const RawReader stopped(server.address());
    stopped.send(hello_frame(server.address().token));
    stopped.send(asked);
    const RemoteArena remote(server.address());
    const auto source = remote.open(remote.next_part("", 0).value(), "rank3.arena");
    EXPECT_EQ(read_whole(*source), kept.arena);
    server.serve(other.part);
    EXPECT_EQ(remote.next_part(kept.part.writer, 1).value().number, 2U);
  }
  ArenaServer server({.silence = kSoon, .most_connections = 1});
  server.serve(kept.part);
  const RawReader stopped(server.address());
  stopped.send(hello_frame(server.address().token));
  stopped.send(asked);
  const RemoteArena next(server.address());  // waits for the end of the first
  EXPECT_TRUE(next.next_part("", 0));
}

}  // namespace
}  // namespace tessera
