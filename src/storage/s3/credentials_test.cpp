#include "storage/s3/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"
#include "storage/s3/answers.h"

namespace tessera::s3 {
namespace {

using namespace std::chrono_literals;
using std::chrono::system_clock;
using testing::HasSubstr;

// Gives credentials "0", "1", ... that hold for a time, by a clock that stands.
class Refreshed : public testing::Test {
 protected:
  CredentialSource source(std::chrono::seconds holds) {
    return {[this, holds]() -> Credentials {
              const int number = asked_++;
              if (fails_) throw Error(ErrorCode::io, "nobody there");
              return {std::to_string(number), "s", "", now() + holds};
            },
            [this] { return now(); }};
  }
  [[nodiscard]] system_clock::time_point now() const {
    return system_clock::time_point(now_.load());
  }

  std::atomic<std::chrono::seconds> now_{1'800'000'000s};
  std::atomic<int> asked_{0};
  std::atomic<bool> fails_{false};
};

void pass(std::atomic<std::chrono::seconds>& clock, std::chrono::seconds time) {
  clock = clock.load() + time;
}

TEST_F(Refreshed, FiveMinutesBeforeTheyExpire) {
  CredentialSource credentials = source(1h);
  EXPECT_EQ(credentials.get()->key_id, "0");
  pass(now_, 54min);
  EXPECT_EQ(credentials.get()->key_id, "0");
  pass(now_, 61s);
  EXPECT_EQ(credentials.get()->key_id, "1");
  EXPECT_EQ(asked_, 2);
}

TEST_F(Refreshed, ShortOnesAreAskedForEveryHalfMinute) {
  CredentialSource credentials = source(4min);
  EXPECT_EQ(credentials.get()->key_id, "0");
  EXPECT_EQ(credentials.get()->key_id, "0");
  pass(now_, 30s);
  EXPECT_EQ(credentials.get()->key_id, "1");
}

TEST_F(Refreshed, OldOnesAreKeptWhileTheyHold) {
  CredentialSource credentials = source(1h);
  (void)credentials.get();
  fails_ = true;
  pass(now_, 56min);
  EXPECT_EQ(credentials.get()->key_id, "0");
  EXPECT_EQ(credentials.get()->key_id, "0");
  EXPECT_EQ(asked_, 2);  // not at each request
  pass(now_, 4min);
  EXPECT_EQ(code_of([&] { (void)credentials.get(); }), ErrorCode::io);
  EXPECT_EQ(code_of([&] { (void)credentials.get(); }), ErrorCode::io);
  fails_ = false;
  EXPECT_EQ(credentials.get()->key_id, "4");
}

TEST_F(Refreshed, DroppedOnesAreNotUsedAgain) {
  CredentialSource credentials = source(1h);
  (void)credentials.get();
  credentials.drop();
  EXPECT_EQ(credentials.get()->key_id, "1");
  fails_ = true;
  credentials.drop();
  EXPECT_EQ(code_of([&] { (void)credentials.get(); }), ErrorCode::io);
}

TEST_F(Refreshed, ExpiredOnesAreNone) {
  CredentialSource credentials = source(0s);
  EXPECT_THAT(error_of([&] { (void)credentials.get(); }).message(), HasSubstr("expired"));
}

TEST(CredentialSource, OfManyThreadsOneAsks) {
  constexpr int kThreads = 8;
  std::atomic<int> asked{0};
  CredentialSource credentials(
      [&]() -> Credentials {
        std::this_thread::sleep_for(20ms);
        return {std::to_string(asked++), "s"};
      },
      [] { return system_clock::now(); });
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] { EXPECT_EQ(credentials.get()->key_id, "0"); });
  threads.clear();
  EXPECT_EQ(asked, 1);
}

TEST(CredentialSource, WhileOldOnesHoldNobodyWaits) {
  std::atomic<int> asked{0};
  std::atomic<std::chrono::seconds> now{1'800'000'000s};
  std::barrier is_asking(2), may_answer(2);
  CredentialSource credentials(
      [&]() -> Credentials {
        const int number = asked++;
        if (number == 1) {
          is_asking.arrive_and_wait();
          may_answer.arrive_and_wait();
        }
        return {std::to_string(number), "s", "", system_clock::time_point(now.load()) + 1h};
      },
      [&] { return system_clock::time_point(now.load()); });
  (void)credentials.get();
  pass(now, 56min);
  std::jthread other([&] { EXPECT_EQ(credentials.get()->key_id, "1"); });
  is_asking.arrive_and_wait();
  EXPECT_EQ(credentials.get()->key_id, "0");
  may_answer.arrive_and_wait();
  other.join();
  EXPECT_EQ(credentials.get()->key_id, "1");
}

TEST(ParseTime, AsServersAndProcessesWriteIt) {
  const auto seconds = [](const std::string& text) {
    return std::chrono::floor<std::chrono::seconds>(parse_time(text).time_since_epoch()).count();
  };
  for (const char* text : {"2026-11-25T03:00:00Z", "2026-11-25T03:00:00", "2026-11-25T03:00:00.25Z",
                           "2026-11-25T04:30:00+01:30", "2026-11-24T22:00:00.123456-0500"})
    EXPECT_EQ(seconds(text), 1795575600) << text;
  for (const char* text :
       {"", "soon", "2026-11-25", "2026-11-25T03:00:00.Z", "2026-11-25T03:00:00 Z",
        "2026-11-25T03:00:00+1", "2026-11-25T03:00:00+01:0x", "2026-13-25T03:00:00Z"})
    EXPECT_EQ(code_of([&] { (void)parse_time(text); }), ErrorCode::corrupt) << text;
}

TEST(ParseTime, NeverIsInTheFuture) {
  const auto century = system_clock::now() + 24h * 365 * 100;
  EXPECT_GT(parse_time("9999-12-31T23:59:59Z"), century);
  EXPECT_GT(parse_time("2262-04-11T23:47:16Z"), century);
  EXPECT_LT(parse_time("0001-01-01T00:00:00Z"), system_clock::now());
}

class Anonymous : public testing::Test {
 protected:
  AwsEnvironment environment_;
};

TEST_F(Anonymous, RequestsGoUnsigned) {
  environment_.set("AWS_ACCESS_KEY_ID", "id");
  environment_.set("AWS_SECRET_ACCESS_KEY", "secret");
  const auto get = [](const std::string& profile) {
    return CredentialSource(profile, std::make_shared<HttpClient>()).get();
  };
  EXPECT_EQ(get("")->key_id, "id");
  EXPECT_FALSE(get("anonymous"));
  for (const char* value : {"1", "true"}) {
    environment_.set("AWS_NO_SIGN_REQUEST", value);
    EXPECT_FALSE(get(""));
  }
  CredentialSource("anonymous", nullptr).drop();
}

}  // namespace
}  // namespace tessera::s3
