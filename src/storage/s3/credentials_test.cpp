#include "storage/s3/credentials.h"

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"

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

using testing::ElementsAre;
using testing::Pair;
using testing::UnorderedElementsAre;

auto config(const std::string& text) {
  return parse_profiles(text, SectionsAre::of_config);
}
auto names(const std::string& text) {
  return parse_profiles(text, SectionsAre::names);
}

TEST(ProfileFiles, SectionsOfBothFiles) {
  EXPECT_THAT(config("[default]\na=1\n[profile x]\na=2\n[y]\na=3\n[profilez]\na=4\n[profile]\na=5\n"
                     "[profile \"with blank\"]\na=6\n[ profile\t tab ]\na=7\n"),
              UnorderedElementsAre(Pair("default", ElementsAre(Pair("a", "1"))),
                                   Pair("x", ElementsAre(Pair("a", "2"))),
                                   Pair("with blank", ElementsAre(Pair("a", "6"))),
                                   Pair("tab", ElementsAre(Pair("a", "7")))));
  EXPECT_THAT(names("[default]\na=1\n[x]\na=2\n[unclosed\na=3\n"),
              UnorderedElementsAre(Pair("default", ElementsAre(Pair("a", "1"))),
                                   Pair("x", ElementsAre(Pair("a", "2")))));
}

TEST(ProfileFiles, CommentsAndLineEnds) {
  EXPECT_THAT(
      config("\xEF\xBB\xBF# c\r\n; c\r\nlost = 1\r\n[default]\r\n\r\n  # c\r\nRegion =  x y  \r\n"
             "empty =\r\nk = a#b=c ; d\r\nno setting\r\n"),
      ElementsAre(Pair("default", UnorderedElementsAre(Pair("region", "x y"), Pair("empty", ""),
                                                       Pair("k", "a#b=c ; d")))));
}

TEST(ProfileFiles, NestedSettingsAreNoneOfTheProfile) {
  EXPECT_THAT(
      config("[default]\ns3 =\n  addressing_style = path\n\n  region = nested\n"
             "region = eu-west-1\n[services mine]\ns3 =\n  endpoint_url = no\n"
             "region = no\n"),
      UnorderedElementsAre(
          Pair("default", UnorderedElementsAre(Pair("s3", ""), Pair("region", "eu-west-1"))),
          Pair(services_section("mine"),
               UnorderedElementsAre(Pair("s3", ""), Pair("s3.endpoint_url", "no"),
                                    Pair("region", "no")))));
}

// As configparser does: deeper than the setting above, not merely indented.
TEST(ProfileFiles, IndentedSettingsAreSettings) {
  EXPECT_THAT(
      names("[x]\n  a = 1\n  b = 2\n    c = 3\n d = 4\n  e = 5\n"),
      ElementsAre(Pair("x", UnorderedElementsAre(Pair("a", "1"), Pair("b", "2"), Pair("d", "4")))));
}

TEST(ProfileFiles, CredentialsComeBeforeConfiguration) {
  AwsEnvironment environment;
  EXPECT_EQ(profile_setting("default", "region"), std::nullopt);
  environment.write_config(
      "[default]\nregion = a\nrole = c\naws_access_key_id = 1\naws_secret_access_key = 2\n"
      "aws_session_token = 3\n[profile y]\nregion = z\n");
  environment.write_credentials(
      "[default]\nregion = b\naws_access_key_id = 4\naws_secret_access_key = 5\n");
  EXPECT_EQ(profile_setting("default", "region"), "b");
  EXPECT_EQ(profile_setting("default", "role"), "c");
  EXPECT_EQ(profile_setting("default", "aws_secret_access_key"), "5");
  EXPECT_EQ(profile_setting("default", "aws_session_token"), std::nullopt);  // of the other key
  EXPECT_EQ(profile_setting("y", "region"), "z");
  EXPECT_EQ(profile_setting("z", "region"), std::nullopt);
}

TEST(ProfileFiles, FilesCanBeNamed) {
  AwsEnvironment environment;
  environment.set("AWS_CONFIG_FILE", environment.write("c", "[default]\nregion = a\n"));
  environment.set("AWS_SHARED_CREDENTIALS_FILE", "~/s");
  (void)environment.write("s", "[default]\noutput = json\n");
  EXPECT_EQ(profile_setting("default", "region"), "a");
  EXPECT_EQ(profile_setting("default", "output"), "json");
  environment.set("AWS_CONFIG_FILE", "/dev/null");
  EXPECT_EQ(profile_setting("default", "region"), std::nullopt);
}

TEST(ProfileFiles, FilesThatCannotBeReadAreErrors) {
  AwsEnvironment environment;
  environment.set("AWS_CONFIG_FILE", environment.write("large", std::string((1U << 20U) + 1, '#')));
  EXPECT_EQ(code_of([] { (void)profile_setting("default", "region"); }), ErrorCode::limit);
  environment.set("AWS_CONFIG_FILE", ::testing::TempDir());
  EXPECT_EQ(code_of([] { (void)profile_setting("default", "region"); }), ErrorCode::io);
}

}  // namespace
}  // namespace tessera::s3
