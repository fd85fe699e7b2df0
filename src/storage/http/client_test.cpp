#include "storage/http/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "base/parallel.h"
#include "conformance/errors.h"
#include "conformance/loopback_server.h"
#include "storage/http/limiter.h"
#include "storage/http/shared_library.h"
#include "storage/http/testing.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;
using testing::Not;

ByteView view(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(HttpClient, AnswersAreAnswers) {
  LoopbackServer server(
      [](int, const std::string&) { return scripted(404, "gone", "X-Y:  z \r\nx-y: last\r\n"); });
  HttpClient client(quick());
  const HttpResponse response = client.send(always(get(server.url("/a?b=1"))));
  EXPECT_EQ(response.status, 404);
  EXPECT_EQ(response.reason, "Text");
  EXPECT_EQ(response.text(), "gone");
  EXPECT_EQ(response.header("x-y"), "last");
  EXPECT_EQ(response.header("none"), "");
  EXPECT_EQ(response.attempts, 1);
  EXPECT_THAT(server.request(1), testing::StartsWith("GET /a?b=1 HTTP/1.1\r\n"));
}

TEST(HttpClient, HeadersThatAreListsAreKeptWhole) {
  LoopbackServer server([](int, const std::string&) {
    return scripted(200, "0123456789",
                    "Link: <a>; rel=next\r\nX: y\r\nlink: <b>\r\nContent-Encoding: gzip\r\n"
                    "Content-Encoding: identity\r\n");
  });
  HttpClient client(quick());
  EXPECT_EQ(client.send(always(get(server.url()))).header("link"), "<a>; rel=next, <b>");
  std::string back(10, '\0');
  const HttpRequest into{.url = server.url(), .into = room(back)};
  EXPECT_EQ(code_of([&] { (void)client.send(always(into)); }), ErrorCode::corrupt);
}

TEST(HttpClient, BodiesGoStraightFromAndIntoMemory) {
  LoopbackServer server([](int, const std::string& request) {
    return scripted(200, request.substr(request.find("\r\n\r\n") + 4));
  });
  std::string body(3'000'001, '\0');
  std::iota(body.begin(), body.end(), '\0');
  std::string back(body.size(), '\0');
  const HttpRequest request{.method = "PUT",
                            .url = server.url(),
                            .headers = {{"x-empty", ""}, {"x-full", "1"}},
                            .body = {view(body).subspan(0, 7), {}, view(body).subspan(7)},
                            .into = room(back)};
  HttpClient client(quick());
  const HttpResponse response = client.send(always(request));
  EXPECT_TRUE(back == body);
  EXPECT_TRUE(response.body.empty());
  const std::string head = server.request(1).substr(0, 500);
  EXPECT_THAT(head, HasSubstr("Content-Length: 3000001\r\n"));
  EXPECT_THAT(head, HasSubstr("x-empty:\r\n"));
  EXPECT_THAT(head, HasSubstr("x-full: 1\r\n"));
  EXPECT_THAT(head, Not(HasSubstr("Expect")));
  EXPECT_THAT(head, Not(HasSubstr("Accept-Encoding")));
  EXPECT_EQ(client.counts().bytes_sent, body.size());
  EXPECT_EQ(client.counts().bytes_received, body.size());
  EXPECT_EQ(client.counts().bytes_again, 0U);
}

TEST(HttpClient, MethodsSayHowLongTheirBodiesAre) {
  LoopbackServer server([](int, const std::string& request) {
    return request.starts_with("HEAD") ? Scripted{"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"}
                                       : scripted(204);
  });
  HttpClient client(quick());
  for (const char* method : {"PUT", "POST", "DELETE", "HEAD"})
    (void)client.send(always({.method = method, .url = server.url()}));
  EXPECT_THAT(server.request(1), HasSubstr("Content-Length: 0\r\n"));
  EXPECT_THAT(server.request(2), testing::StartsWith("POST "));
  EXPECT_THAT(server.request(2), HasSubstr("Content-Length: 0\r\n"));
  EXPECT_THAT(server.request(3), testing::StartsWith("DELETE "));
  EXPECT_THAT(server.request(3), Not(HasSubstr("Content-Length")));
  EXPECT_THAT(server.request(4), testing::StartsWith("HEAD "));
  EXPECT_EQ(server.accepted(), 1);  // connections are kept
}

// Every way in which an attempt may fail and the next one succeed.
TEST(HttpClient, TriesAgainWhatMayPass) {
  const std::string good = "0123456789";
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n";
  const Scripted bad[] = {
      scripted(429),
      scripted(500),
      scripted(502),
      scripted(503),
      scripted(504),
      {"", Then::close},
      {"", Then::reset},
      {"HTTP/1.1 200 OK\r\nConte", Then::close},
      {head, Then::reset},
      {head + "0123", Then::close},
      {head + "0123", Then::reset},
      {head + "0123", Then::stall},
      {"", Then::stall},
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n", Then::close},
      {"HTTP/1.1 200 OK\r\n\r\n0123", Then::close},
      scripted(200, "0123"),
      scripted(200, "0123456789a"),
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n0123456789a\r\n0\r\n\r\n"},
      scripted(200),
      scripted(503, "busy", "Retry-After: 0\r\n"),
  };
  for (const Scripted& first : bad) {
    LoopbackServer server(
        [&](int number, const std::string&) { return number == 1 ? first : scripted(200, good); });
    HttpClient client(quick());
    std::string out(10, '\0');
    const HttpResponse response = client.send(always({.url = server.url(), .into = room(out)}));
    EXPECT_EQ(response.status, 200) << first.bytes;
    EXPECT_EQ(response.attempts, 2) << first.bytes;
    EXPECT_EQ(out, good) << first.bytes;
    EXPECT_EQ(client.counts().requests, 2U);
    EXPECT_EQ(client.counts().retries, 1U);
    EXPECT_EQ(client.counts().bytes_received - client.counts().bytes_again, good.size());
  }
}

TEST(HttpClient, PreparesEachAttempt) {
  LoopbackServer server(
      [](int number, const std::string&) { return scripted(number < 4 ? 503 : 200); });
  HttpClient client(quick());
  const auto prepare = [&](int attempt) {
    return HttpRequest{.url = server.url("/" + std::to_string(attempt))};
  };
  EXPECT_EQ(client.send(prepare).attempts, 4);
  EXPECT_THAT(server.request(4), testing::StartsWith("GET /4 "));
}

TEST(HttpClient, ResetBeforeARequestIsReadIsTriedAgain) {
  LoopbackServer server([](int, const std::string&) { return scripted(200); });
  server.reset_next(2);
  HttpClient client(quick());
  EXPECT_EQ(client.send(always(get(server.url()))).attempts, 3);
  EXPECT_EQ(server.requests(), 1);
}

// libcurl would send it again on its own, and nobody would know that it was sent twice.
TEST(HttpClient, RequestsOnKeptConnectionsThatCloseAreAttempts) {
  for (const char* method : {"GET", "PUT", "DELETE"}) {
    LoopbackServer server([](int number, const std::string&) {
      return number == 2 ? Scripted{"", Then::reset} : scripted(200);
    });
    HttpClient client(quick());
    const std::string body = std::string_view(method) == "PUT" ? "body" : "";
    const auto prepare = always({.method = method, .url = server.url(), .body = {view(body)}});
    EXPECT_EQ(client.send(prepare).attempts, 1);
    EXPECT_EQ(client.send(prepare).attempts, 2) << method;
    EXPECT_EQ(server.requests(), 3);
    EXPECT_EQ(client.counts().requests, 3U);
  }
}

TEST(HttpClient, OtherStatusesAreNotTriedAgain) {
  for (const int status : {301, 307, 400, 401, 403, 404, 409, 412, 416, 501}) {
    LoopbackServer server(
        [&](int, const std::string&) { return scripted(status, {}, "Location: /elsewhere\r\n"); });
    HttpClient client(quick());
    std::string out(10, '\0');
    EXPECT_EQ(client.send(always({.url = server.url(), .into = room(out)})).status, status);
    EXPECT_EQ(server.requests(), 1) << status;
  }
}

TEST(HttpClient, CallersMayAskForAnotherAttempt) {
  LoopbackServer server(
      [](int number, const std::string&) { return scripted(number == 1 ? 400 : 200, "x"); });
  HttpClient client(quick());
  std::vector<int> seen;
  const HttpResponse response =
      client.send(always(get(server.url())), [&](const HttpResponse& got) {
        seen.push_back(got.status);
        return got.status == 400;
      });
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.attempts, 2);
  EXPECT_THAT(seen, testing::ElementsAre(400, 200));
  EXPECT_EQ(client.counts().bytes_again, 1U);
}

TEST(HttpClient, RefusedConnectionsEndInIo) {
  LoopbackServer server([](int, const std::string&) { return scripted(200); });
  server.stop();
  HttpOptions options = quick();
  options.operation_within = 1s;
  options.most_unanswered = 1000;
  HttpClient client(options);
  const Error error = error_of([&] { (void)client.send(always(get(server.url("/x")))); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_EQ(error.path(), server.url("/x"));
  EXPECT_GT(client.counts().requests, 3U);
}

// Whoever wrote the wrong name need not wait for all of the time.
TEST(HttpClient, WhereNobodyListensItEndsSoon) {
  LoopbackServer server([](int, const std::string&) { return scripted(200); });
  server.stop();
  HttpOptions options = quick();
  options.most_unanswered = 3;
  HttpClient client(options);
  EXPECT_EQ(code_of([&] { (void)client.send(always(get(server.url()))); }), ErrorCode::io);
  EXPECT_EQ(client.counts().requests, 3U);
}

TEST(HttpClient, ThreadsSendAtOnce) {
  LoopbackServer server([](int, const std::string& request) {
    const std::size_t begin = request.find(' ') + 1;
    return scripted(200, request.substr(begin, request.find(' ', begin) - begin));
  });
  HttpClient client(quick());
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 20; ++t) {
    threads.emplace_back([&, path = "/" + std::to_string(t)] {
      for (int i = 0; i < 10; ++i)
        if (client.send(always(get(server.url(path)))).text() == path) ++right;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 200);
}

TEST(HttpClient, ThreeBodiesThatDoNotFitAreCorrupt) {
  for (const std::string& body : {std::string("short"), std::string(1 << 20, 'x')}) {
    LoopbackServer server([&](int, const std::string&) { return scripted(206, body); });
    HttpClient client(quick());
    std::string out(10, '\0');
    const Error error =
        error_of([&] { (void)client.send(always({.url = server.url(), .into = room(out)})); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(body.size()) + " bytes, expected 10"));
    EXPECT_EQ(server.requests(), 3);
  }
}

// Nothing behind `into` is written, whatever the server sends without saying so before.
TEST(HttpClient, EndlessBodiesAreStopped) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{"HTTP/1.1 200 OK\r\n\r\n" + std::string(50 << 20, 'x'), Then::close};
  });
  HttpClient client(quick());
  std::string out(20, '\0');
  EXPECT_EQ(code_of([&] {
              (void)client.send(always({.url = server.url(), .into = room(out).subspan(0, 10)}));
            }),
            ErrorCode::corrupt);
  EXPECT_EQ(out.substr(10), std::string(10, '\0'));
  EXPECT_LT(client.counts().bytes_received, 4U << 20U);
  const HttpRequest small{.url = server.url(), .most_body = 1000};
  EXPECT_EQ(code_of([&] { (void)client.send(always(small)); }), ErrorCode::limit);
}

TEST(HttpClient, OfErrorsTheBeginIsKept) {
  LoopbackServer server(
      [](int, const std::string&) { return scripted(400, std::string(50 << 20, 'x')); });
  HttpClient client(quick());
  const HttpResponse response = client.send(always({.url = server.url(), .most_body = 10}));
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(response.attempts, 1);
  EXPECT_LE(response.body.size(), 64U << 10U);
}

TEST(HttpClient, FloodsOfHeadersAreCorrupt) {
  std::string many, interim = "HTTP/1.1 100 Continue\r\n\r\n";
  for (int i = 0; i < 1000; ++i) many += "x" + std::to_string(i) + ": y\r\n";
  for (int i = 0; i < 9; ++i) interim += interim;
  const std::string long_ones =
      "a: " + std::string(40'000, 'x') + "\r\nb: " + std::string(40'000, 'x') + "\r\n";
  for (const std::string& bytes :
       {"HTTP/1.1 200 OK\r\n" + many, "HTTP/1.1 200 OK\r\n" + long_ones, interim}) {
    LoopbackServer server([&](int, const std::string&) {
      return Scripted{bytes + "\r\n", Then::close};
    });
    HttpClient client(quick());
    EXPECT_EQ(code_of([&] { (void)client.send(always(get(server.url()))); }), ErrorCode::corrupt);
    EXPECT_EQ(server.requests(), 1);
  }
}

TEST(HttpClient, EncodedBodiesAreNotTheObject) {
  for (const auto& [coding, is_good] :
       std::vector<std::pair<std::string, bool>>{{"gzip", false},
                                                 {"aws-chunked, GZIP", false},
                                                 {"aws-chunked", true},
                                                 {"identity", true}}) {
    LoopbackServer server([&coding = coding](int, const std::string&) {
      return scripted(200, "0123456789", "Content-Encoding: " + coding + "\r\n");
    });
    HttpClient client(quick());
    std::string out(10, '\0');
    const auto send = [&] { (void)client.send(always({.url = server.url(), .into = room(out)})); };
    if (is_good) {
      EXPECT_NO_THROW(send());
    } else {
      EXPECT_EQ(code_of(send), ErrorCode::corrupt) << coding;
    }
  }
}

// An interim answer is none, and what stands behind a body is no header of it.
TEST(HttpClient, HeadersAreThoseOfTheAnswer) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{
        "HTTP/1.1 100 Continue\r\netag: \"interim\"\r\n\r\nHTTP/1.1 200 OK\r\n"
        "Transfer-Encoding: chunked\r\netag: \"true\"\r\n\r\n"
        "1\r\nx\r\n0\r\netag: \"late\"\r\n\r\n"};
  });
  HttpClient client(quick());
  EXPECT_EQ(client.send(always(get(server.url()))).header("etag"), "\"true\"");
}

TEST(HttpClient, WhatIsNoHttpIsNotTried) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{"SSH-2.0-x\r\n", Then::close};
  });
  HttpClient client(quick());
  EXPECT_EQ(code_of([&] { (void)client.send(always(get(server.url()))); }), ErrorCode::io);
  EXPECT_EQ(server.requests(), 1);
}

// 0.0.0.0 is this host too, but its name does not say so.
TEST(HttpClient, PlainHttpIsForLoopback) {
  HttpClient client(quick());
  for (const char* url :
       {"http://example.invalid/a", "http://127.0.0.1.example.invalid/", "http://0.0.0.0:1/"}) {
    EXPECT_EQ(code_of([&] { (void)client.send(always(get(url))); }), ErrorCode::unsafe);
  }
  EXPECT_EQ(client.counts().requests, 0U);
  HttpOptions options = quick();
  options.operation_within = 1s;
  options.allow_http = true;
  HttpClient bold(options);
  EXPECT_EQ(code_of([&] { (void)bold.send(always(get("http://0.0.0.0:1/"))); }), ErrorCode::io);
  EXPECT_GT(bold.counts().requests, 0U);
}

TEST(HttpClient, TheEnvironmentMayAllowPlainHttp) {
  ::setenv("TESSERA_ALLOW_HTTP", "1", 1);
  HttpOptions options = quick();
  options.operation_within = 1s;
  HttpClient client(options);
  ::unsetenv("TESSERA_ALLOW_HTTP");
  EXPECT_EQ(code_of([&] { (void)client.send(always(get("http://0.0.0.0:1/"))); }), ErrorCode::io);
}

TEST(HttpClient, TheEnvironmentSetsLimits) {
  ::setenv("TESSERA_HTTP_REQUESTS", "3", 1);
  ::setenv("TESSERA_HTTP_STALL", "1", 1);
  ::setenv("TESSERA_HTTP_DEADLINE", "2", 1);
  HttpClient client;
  EXPECT_EQ(client.most_in_flight(), 3);
  LoopbackServer stalling([](int, const std::string&) { return Scripted{"", Then::stall}; });
  EXPECT_EQ(code_of([&] { (void)client.send(always(get(stalling.url()))); }), ErrorCode::timeout);
  for (const char* text : {"0", "-1", "x", "1s", "99999999999"}) {
    ::setenv("TESSERA_HTTP_STALL", text, 1);
    const Error error = error_of([] { HttpClient(); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_THAT(error.what(), HasSubstr("TESSERA_HTTP_STALL"));
  }
  for (const char* name : {"TESSERA_HTTP_REQUESTS", "TESSERA_HTTP_STALL", "TESSERA_HTTP_DEADLINE"})
    ::unsetenv(name);
}

TEST(HttpClient, AProxyIsNotAskedForLoopback) {
  ::setenv("http_proxy", "http://127.0.0.1:1", 1);
  LoopbackServer server([](int, const std::string&) { return scripted(200); });
  HttpClient client(quick());
  EXPECT_EQ(client.send(always(get(server.url()))).attempts, 1);
  ::unsetenv("http_proxy");
}

TEST(HttpClient, TheProxiesOfTheEnvironmentAreAsked) {
  LoopbackServer proxy([](int, const std::string&) { return scripted(200, "by the proxy"); });
  HttpOptions options = quick();
  options.connect_within = 50ms;
  options.operation_within = 1s;
  options.allow_http = true;
  HttpClient client(options);
  const auto is_asked = [&](const char* name, const std::string& without = {}) {
    ::setenv(name, proxy.url().c_str(), 1);
    ::setenv("no_proxy", without.c_str(), 1);
    std::string answer;
    try {
      answer = client.send(always(get("http://192.0.2.1/a"))).text();
    } catch (const Error&) {  // nobody has that address
    }
    ::unsetenv(name);
    ::unsetenv("no_proxy");
    return answer == "by the proxy";
  };
  for (const char* name : {"http_proxy", "all_proxy", "ALL_PROXY"}) EXPECT_TRUE(is_asked(name));
  EXPECT_THAT(proxy.request(1), testing::StartsWith("GET http://192.0.2.1/a HTTP/1.1\r\n"));
  EXPECT_FALSE(is_asked("HTTP_PROXY"));  // which callers of programs by CGI may set
  EXPECT_FALSE(is_asked("https_proxy"));
  EXPECT_FALSE(is_asked("http_proxy", "192.0.2.1"));
  EXPECT_FALSE(is_asked("http_proxy", "*"));
  EXPECT_TRUE(is_asked("http_proxy", "example.com"));
}

TEST(HttpClient, RefusesRequestsThatAreNone) {
  HttpClient client(quick());
  const auto code = [&](HttpRequest request) {
    return code_of([&] { (void)client.send(always(std::move(request))); });
  };
  EXPECT_EQ(code(get("ftp://127.0.0.1/")), ErrorCode::unsupported);
  EXPECT_EQ(code(get("http://127.0.0.1/a b")), ErrorCode::invalid_argument);
  EXPECT_EQ(code({.url = "http://127.0.0.1:1/", .headers = {{"a", "b\r\nc: d"}}}),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([] { HttpClient none({.most_in_flight = 0}); }), ErrorCode::invalid_argument);
}

TEST(HttpClient, NoMoreThanTheLimitAreInFlight) {
  std::atomic<int> now{0}, most{0};
  LoopbackServer server([&](int, const std::string&) {
    const int at_once = ++now;
    for (int seen = most; seen < at_once && !most.compare_exchange_weak(seen, at_once);) {
    }
    std::this_thread::sleep_for(20ms);
    --now;
    return scripted(200);
  });
  HttpOptions options = quick();
  options.most_in_flight = 3;
  HttpClient client(options);
  std::vector<std::thread> threads;
  for (int i = 0; i < 9; ++i)
    threads.emplace_back([&] { (void)client.send(always(get(server.url()))); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(most, 3);
  EXPECT_LE(server.accepted(), 3);
}

// Credentials are asked for over the same client, while a request is being prepared.
TEST(HttpClient, PreparingMaySendItself) {
  LoopbackServer server([](int, const std::string&) { return scripted(200); });
  HttpOptions options = quick();
  options.most_in_flight = 1;
  HttpClient client(options);
  const auto prepare = [&](int) {
    (void)client.send(always(get(server.url("/token"))));
    return get(server.url("/object"));
  };
  EXPECT_EQ(client.send(prepare).status, 200);
}

TEST(Limiter, HalvesOnceForRequestsInFlightTogether) {
  Limiter limiter(16);
  {
    Limiter::Place a(limiter), b(limiter);
    a.was_busy();
    b.was_busy();
  }
  EXPECT_EQ(limiter.bound(), 8);
  for (int i = 0; i < 10; ++i) Limiter::Place(limiter).was_busy();
  EXPECT_EQ(limiter.bound(), 1);
  for (int i = 0; i < 16 * 17; ++i) Limiter::Place(limiter).went_well();
  EXPECT_EQ(limiter.bound(), 16);
}

TEST(Backoff, DoublesUpToItsLongestWithJitter) {
  Backoff backoff(100ms);
  for (auto bound = 100ms; bound < 200'000ms; bound *= 2) {
    const auto pause = backoff.next();
    EXPECT_GE(pause, std::min(bound, 20'000ms) / 2);
    EXPECT_LE(pause, std::min(bound, 20'000ms));
  }
}

TEST(SharedLibrary, NamesWhatIsMissing) {
  const Error error = error_of([] { const SharedLibrary none("libnone.so.7"); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_THAT(error.what(), HasSubstr("libnone.so.7"));
  int* function = nullptr;
  EXPECT_EQ(code_of([&] { SharedLibrary("libc.so.6").find("no_such_function", function); }),
            ErrorCode::unsupported);
}

TEST(Describe, TellsTheAnswerAndNoSecret) {
  const HttpRequest request{.method = "PUT", .url = "https://h/b/k?X-Amz-Signature=5ecret"};
  HttpResponse response;
  response.status = 403;
  response.reason = "For\nbidden";
  response.headers["x-amz-request-id"] = "R1";
  const std::string body =
      "<Error><Code>ExpiredToken</Code><Message>It has expired</Message><Token-0>5ecret</Token-0>";
  const auto bytes = view(body);
  response.body.assign(bytes.begin(), bytes.end());
  EXPECT_EQ(describe(request, response),
            "PUT https://h/b/k: 403 For?bidden, request id R1, ExpiredToken: It has expired");
}

HttpResponse refusal_with(const std::string& reason, const std::string& code,
                          const std::string& message) {
  HttpResponse response;
  response.status = 403;
  response.reason = reason;
  response.headers["x-request-id"] = code;
  const std::string body = "<Error><Code>" + code + "</Code><Message>" + message + "</Message>";
  const auto bytes = view(body);
  response.body.assign(bytes.begin(), bytes.end());
  return response;
}

TEST(Describe, InWordsTellsNothingElse) {
  const HttpRequest request{.url = "https://h/b/k?sig=5ecret"};
  EXPECT_EQ(describe_in_words(request, refusal_with("Forbidden", "ExpiredToken", "It's over.")),
            "GET https://h/b/k: 403 Forbidden, request id ExpiredToken, ExpiredToken: It's over.");
  for (const std::string& text :
       {std::string("5ecret"), std::string("the url was /b/k?sig=secret"), std::string("a=secret"),
        std::string("Bearer hf_secret"), std::string(33, 's'), std::string("secret%3D")}) {
    EXPECT_EQ(describe_in_words(request, refusal_with(text, text, text)), "GET https://h/b/k: 403");
  }
}

}  // namespace
}  // namespace tessera
