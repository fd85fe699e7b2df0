// How long requests wait: for a server that is slow, busy or silent, and beside a stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/parallel.h"
#include "conformance/errors.h"
#include "storage/http/testing.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using std::chrono::steady_clock;
using testing::HasSubstr;

// A server that works sends a blank now and then; one byte a second is no rate for anything else.
TEST(HttpClient, BlanksShowThatAServerWorks) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", Then::trickle};
  });
  HttpClient client(quick());
  const HttpRequest work{.method = "POST", .url = server.url(), .works_for = 2s};
  EXPECT_EQ(client.send(always(work)).text(), "      ");
  EXPECT_EQ(client.counts().requests, 1U);
  HttpOptions options = quick();
  options.operation_within = 5s;
  HttpClient impatient(options);
  EXPECT_EQ(code_of([&] { (void)impatient.send(always(get(server.url()))); }), ErrorCode::timeout);
}

// Whoever waits for an answer, for its body or for the next attempt.
TEST(HttpClient, AStopEndsRequests) {
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab";
  for (const Scripted& silent : {Scripted{"", Then::stall}, Scripted{head, Then::stall},
                                 scripted(503, "", "Retry-After: 20\r\n")}) {
    std::stop_source source;
    LoopbackServer server([&](int, const std::string&) {
      source.request_stop();
      return silent;
    });
    HttpOptions options = quick();
    options.slow_for = options.operation_within = 600s;
    HttpClient client(options);
    const HeedStop heeding(source.get_token());
    std::vector<ErrorCode> codes(3);
    parallel_for(3, codes.size(), [&](std::size_t i) {
      codes[i] = code_of([&] { (void)client.send(always(get(server.url()))); });
    });
    EXPECT_THAT(codes, testing::Each(ErrorCode::cancelled)) << silent.bytes;
    const int sent = server.requests();
    EXPECT_EQ(code_of([&] { (void)client.send(always(get(server.url()))); }), ErrorCode::cancelled);
    EXPECT_EQ(server.requests(), sent);
  }
}

// A commit whose answer is on its way is not cut, and what is left to do then is tried once.
TEST(HttpClient, AStopLeavesWhatSettlesAttempts) {
  std::stop_source source;
  LoopbackServer server([&](int number, const std::string&) {
    source.request_stop();
    return number == 2 ? scripted(503) : scripted(200, "done");
  });
  HttpClient client(quick());
  const HeedStop heeding(source.get_token());
  const Settling settling;
  EXPECT_EQ(client.send(always(get(server.url()))).text(), "done");
  EXPECT_EQ(client.send(always(get(server.url()))).status, 503);
  EXPECT_EQ(server.requests(), 2);
}

// Nobody waits half a minute for what a silent server does.
TEST(HttpClient, WhatSettlesBesideASilentServerEndsSoonAfterAStop) {
  std::stop_source source;
  LoopbackServer server([&](int, const std::string&) {
    source.request_stop();
    return Scripted{"", Then::stall};
  });
  HttpOptions options = quick();
  options.slow_for = options.operation_within = 600s;
  HttpClient client(options);
  const HeedStop heeding(source.get_token());
  const Settling settling;
  EXPECT_EQ(code_of([&] { (void)client.send(always(get(server.url()))); }), ErrorCode::cancelled);
  EXPECT_EQ(server.requests(), 1);
}

TEST(HttpClient, TheLastAnswerIsReturnedWhenTimeIsOver) {
  LoopbackServer server([](int, const std::string&) { return scripted(503, "busy"); });
  HttpOptions options = quick();
  options.operation_within = 1s;
  HttpClient client(options);
  const auto begin = steady_clock::now();
  const HttpResponse response = client.send(always(get(server.url())));
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(response.text(), "busy");
  EXPECT_GT(response.attempts, 3);
  EXPECT_LT(steady_clock::now() - begin, 3s);
}

TEST(HttpClient, ARetryAfterBeyondTheEndIsNotWaitedFor) {
  LoopbackServer server(
      [](int, const std::string&) { return scripted(503, {}, "Retry-After: 3600\r\n"); });
  HttpOptions options = quick();
  options.operation_within = 15s;
  HttpClient client(options);
  const auto begin = steady_clock::now();
  EXPECT_EQ(client.send(always(get(server.url()))).attempts, 1);
  EXPECT_LT(steady_clock::now() - begin, 5s);
}

// As the Hugging Face Hub says when it will answer again (draft-ietf-httpapi-ratelimit-headers).
TEST(HttpClient, ALimitIsWaitedForIfNothingOfItRemains) {
  for (const auto& [limit, attempts] :
       {std::pair(R"("api";r=0;t=3600)", 1), std::pair(R"("pages" ; r=0; t=3600)", 1),
        std::pair(R"("api";r=7;t=3600)", 2), std::pair(R"("api";r=0;t=soon)", 2),
        std::pair(R"("api";r=0)", 2), std::pair(R"("api")", 2)}) {
    LoopbackServer server([&, header = limit](int number, const std::string&) {
      if (number > 1) return scripted(200);
      return scripted(429, {}, std::string("RateLimit: ") + header + "\r\n");
    });
    HttpOptions options = quick();
    options.operation_within = 15s;
    HttpClient client(options);
    EXPECT_EQ(client.send(always(get(server.url()))).attempts, attempts) << limit;
  }
}

TEST(HttpClient, StallsEndInTimeout) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123", Then::stall};
  });
  HttpOptions options = quick();
  options.operation_within = 2s;
  HttpClient client(options);
  std::string out(10, '\0');
  const Error error = error_of(
      [&] { (void)client.send(always({.url = server.url("/x?secret=1"), .into = room(out)})); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_EQ(error.path(), server.url("/x"));
  EXPECT_THAT(error.what(), HasSubstr("GET: "));
  EXPECT_THAT(error.what(), HasSubstr(" attempts"));
  EXPECT_THAT(error.what(), Not(HasSubstr("secret")));
}

TEST(HttpClient, ServersThatWorkMayHaveLonger) {
  LoopbackServer server([](int, const std::string&) {
    std::this_thread::sleep_for(2500ms);
    return scripted(200);
  });
  HttpClient client(quick());  // which waits for 1 s
  EXPECT_EQ(client.send(always({.url = server.url(), .works_for = 10s})).attempts, 1);
}

}  // namespace
}  // namespace tessera
