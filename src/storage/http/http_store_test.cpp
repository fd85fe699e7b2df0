#include "storage/http/http_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "conformance/errors.h"
#include "conformance/loopback_server.h"
#include "storage/http/uri.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::shared_ptr<HttpClient> quick_client() {
  HttpOptions options;
  options.operation_within = 10s;
  options.first_pause = 2ms;
  return std::make_shared<HttpClient>(options);
}

Scripted scripted(int status, const std::string& body = {}, const std::string& headers = {}) {
  return {http_answer(status, body, headers)};
}

std::string field(const std::string& request, const std::string& name) {
  const std::string begin = "\r\n" + name + ": ";
  const std::size_t at = request.find(begin);
  if (at == std::string::npos) return {};
  const std::size_t from = at + begin.size();
  return request.substr(from, request.find("\r\n", from) - from);
}

std::string target(const std::string& request) {
  const std::size_t from = request.find(' ') + 1;
  return request.substr(from, request.find(' ', from) - from);
}

// A web server as it should be, with one object, and with what a test changes in it.
struct Site {
  std::string path = "/dir/a%20b", bytes = "0123456789", etag = "\"v1\"", last_modified = {};
  bool has_head = true, has_ranges = true, heeds_match = true;

  [[nodiscard]] Scripted operator()(const std::string& request) const {
    if (target(request) != path) return scripted(404, "nothing");
    std::string headers;
    if (!etag.empty()) headers += "ETag: " + etag + "\r\n";
    if (!last_modified.empty()) headers += "Last-Modified: " + last_modified + "\r\n";
    const bool is_head = request.starts_with("HEAD");
    if (is_head && !has_head) return {"HTTP/1.1 405 No\r\n\r\n"};
    const std::string match = field(request, "If-Match");
    if (heeds_match && !match.empty() && match != etag) return scripted(412);
    const std::string range = field(request, "Range");
    if (range.empty() || !has_ranges) {
      Scripted whole = scripted(200, bytes, headers);
      if (is_head) whole.bytes.resize(whole.bytes.size() - bytes.size());
      return whole;
    }
    if (bytes.empty()) return scripted(416, {}, "Content-Range: bytes */0\r\n");
    const std::size_t from = std::stoul(range.substr(6));
    const std::size_t last = std::stoul(range.substr(range.find('-') + 1));
    headers +=
        "Content-Range: bytes " + range.substr(6) + "/" + std::to_string(bytes.size()) + "\r\n";
    return scripted(206, bytes.substr(from, last + 1 - from), headers);
  }
};

// A store on a site, which a test may change while the store uses it.
struct Served {
  explicit Served(Site begin = {}) : site(std::move(begin)) {}

  void change(const std::function<void(Site&)>& how) {
    const std::lock_guard lock(mutex);
    how(site);
  }

  std::mutex mutex;
  Site site;  // guarded by mutex
  LoopbackServer server{[this](int, const std::string& request) {
    const std::lock_guard lock(mutex);
    return site(request);
  }};
  std::shared_ptr<HttpClient> client = quick_client();
  std::shared_ptr<Store> store = http_store(parse_uri(server.url("/dir/")), client);
};

std::string read(const ByteSource& source, std::uint64_t offset, std::size_t size) {
  std::string out(size, '\0');
  source.read_at(offset, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST(HttpStore, ReadsRangesOfTheVersionThatItOpened) {
  Served served;
  const auto source = served.store->open("a b");
  EXPECT_EQ(source->size(), 10U);
  EXPECT_EQ(source->name(), served.server.url("/dir/a%20b"));
  EXPECT_EQ(read(*source, 3, 4), "3456");
  EXPECT_EQ(read(*source, 0, 10), "0123456789");
  EXPECT_THAT(served.server.request(1), StartsWith("HEAD "));
  EXPECT_EQ(field(served.server.request(2), "Range"), "bytes=3-6");
  EXPECT_EQ(field(served.server.request(2), "If-Match"), "\"v1\"");
  EXPECT_TRUE(served.store->exists("a b"));
  EXPECT_FALSE(served.store->exists("a"));
  EXPECT_EQ(code_of([&] { (void)served.store->open("a"); }), ErrorCode::not_found);
}

// No header can ask for no bytes: "bytes=5-4" asks for all of them.
TEST(HttpStore, EmptyRangesCostNoRequest) {
  Served served;
  const auto source = served.store->open("a b");
  EXPECT_EQ(read(*source, 5, 0), "");
  EXPECT_EQ(read(*source, 10, 0), "");
  EXPECT_EQ(served.server.requests(), 1);
  EXPECT_EQ(code_of([&] { (void)read(*source, 5, 6); }), ErrorCode::incomplete);
  EXPECT_EQ(served.server.requests(), 1);
}

TEST(HttpStore, AQueryStaysWithTheNameAndOutOfErrors) {
  LoopbackServer server([](int, const std::string& request) {
    return scripted(
        403, "<Error><Code>AccessDenied</Code><Message>" + target(request) + "</Message></Error>",
        "x-request-id: " + target(request) + "\r\n");
  });
  const auto store = http_store(parse_uri(server.url("/d?sig=5ecret")), quick_client());
  const Error error = error_of([&] { (void)store->open("x"); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_EQ(error.path(), server.url("/d/x"));
  EXPECT_THAT(error.what(), HasSubstr("GET"));
  EXPECT_THAT(error.what(), HasSubstr("403 Text, AccessDenied"));
  EXPECT_THAT(error.what(), Not(HasSubstr("5ecret")));
  EXPECT_THAT(store->name(), Not(HasSubstr("5ecret")));
  EXPECT_EQ(target(server.request(2)), "/d/x?sig=5ecret");
}

// A signature may cover the spelling.
TEST(HttpStore, ANameIsAskedForAsItWasWritten) {
  LoopbackServer server([](int, const std::string&) { return scripted(404, "no"); });
  const auto store =
      http_store(parse_uri(server.url("/d?sig=1")), quick_client(), {"a+b c", "a+b%20c"});
  EXPECT_FALSE(store->exists("a+b c"));
  EXPECT_FALSE(store->exists("a+b"));
  EXPECT_EQ(target(server.request(1)), "/d/a+b%20c?sig=1");
  EXPECT_EQ(target(server.request(2)), "/d/a%2Bb?sig=1");
}

TEST(HttpStore, ServersWithoutHeadTellTheSizeByARange) {
  Served served({.has_head = false});
  EXPECT_EQ(read(*served.store->open("a b"), 8, 2), "89");
  served.change([](Site& site) { site.bytes = ""; });
  EXPECT_EQ(served.store->open("a b")->size(), 0U);
  served.change([](Site& site) { site = {.has_head = false, .has_ranges = false}; });
  EXPECT_EQ(code_of([&] { (void)served.store->open("a b"); }), ErrorCode::unsupported);
  served.change([](Site& site) { site.bytes = "x"; });
  EXPECT_EQ(read(*served.store->open("a b"), 0, 1), "x");
}

TEST(HttpStore, ARangeMayBeAnsweredByAllIfItIsAll) {
  Served served({.has_ranges = false});
  const auto source = served.store->open("a b");
  EXPECT_EQ(read(*source, 0, 10), "0123456789");
  EXPECT_EQ(code_of([&] { (void)read(*source, 1, 9); }), ErrorCode::corrupt);
}

// A replaced object is noticed by each of the signs that servers give.
TEST(HttpStore, ReplacedObjectsAreConflicts) {
  const std::string monday = "Mon, 23 Nov 2026 00:00:00 GMT",
                    today = "Wed, 25 Nov 2026 00:00:00 GMT";
  const struct {
    Site before;
    std::function<void(Site&)> change;
  } cases[] = {
      {{}, [](Site& site) { site.etag = "\"v2\""; }},
      {{.heeds_match = false}, [](Site& site) { site.etag = "\"v2\""; }},
      {{.etag = "W/\"1\""}, [](Site& site) { site.etag = "W/\"2\""; }},
      {{.etag = "W/\"1\""}, [](Site& site) { site.etag = ""; }},
      {{.etag = "", .last_modified = monday}, [&](Site& site) { site.last_modified = today; }},
      {{.etag = "", .last_modified = monday}, [&](Site& site) { site.last_modified = ""; }},
      {{.etag = ""}, [](Site& site) { site.bytes += "more"; }},
      {{}, [](Site& site) { site.bytes = ""; }},
  };
  int number = 0;
  for (const auto& [before, change] : cases) {
    Served served(before);
    const auto source = served.store->open("a b");
    EXPECT_EQ(read(*source, 1, 2), "12");
    served.change(change);
    const Error error = error_of([&] { (void)read(*source, 1, 2); });
    EXPECT_EQ(error.code(), ErrorCode::conflict) << "case " << number;
    EXPECT_THAT(error.what(), HasSubstr("was replaced while it was read"));
    ++number;
  }
}

TEST(HttpStore, WeakVersionsAreNoPrecondition) {
  Served served({.etag = "W/\"1\"", .last_modified = "Mon, 23 Nov 2026 00:00:00 GMT"});
  EXPECT_EQ(read(*served.store->open("a b"), 0, 1), "0");
  const std::string request = served.server.request(2);
  EXPECT_EQ(field(request, "If-Match"), "");
  EXPECT_EQ(field(request, "If-Unmodified-Since"), "Mon, 23 Nov 2026 00:00:00 GMT");
}

TEST(HttpStore, OtherRangesThanAskedForAreCorrupt) {
  for (const char* range :
       {"bytes 0-3/10", "bytes 2-5/10", "bytes 1-5/10", "4", "items 1-4/10", "bytes=1-4/10", ""}) {
    LoopbackServer server([&](int, const std::string& request) {
      if (request.starts_with("HEAD"))
        return Scripted{"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"};
      return scripted(206, "wxyz", std::string("Content-Range: ") + range + "\r\n");
    });
    const auto source = http_store(parse_uri(server.url()), quick_client())->open("x");
    EXPECT_EQ(code_of([&] { (void)read(*source, 1, 4); }), ErrorCode::corrupt) << range;
  }
}

TEST(HttpStore, AnObjectThatVanishedIsNotFound) {
  Served served;
  const auto source = served.store->open("a b");
  served.change([](Site& site) { site.path = "/elsewhere"; });
  EXPECT_EQ(code_of([&] { (void)read(*source, 0, 1); }), ErrorCode::not_found);
}

// Whatever the ranges, the bytes are those of the object.
TEST(HttpStore, ReadsManyRangesAtOnce) {
  Served served;
  std::mt19937 random(7);
  std::string bytes(100'000, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  served.change([&](Site& site) { site.bytes = bytes; });
  const auto source = served.store->open("a b");
  std::vector<std::string> outs(100);
  std::vector<ReadRange> ranges;
  std::vector<std::size_t> offsets;
  for (std::string& out : outs) {
    offsets.push_back(random() % bytes.size());
    out.resize(random() % (bytes.size() - offsets.back()));
    ranges.push_back({offsets.back(), std::as_writable_bytes(std::span(out))});
  }
  source->read_ranges(ranges);
  for (std::size_t i = 0; i < outs.size(); ++i)
    EXPECT_TRUE(outs[i] == bytes.substr(offsets[i], outs[i].size()));
  EXPECT_LE(served.server.accepted(), served.client->most_in_flight());
  EXPECT_GT(served.server.accepted(), 1);
}

TEST(HttpStore, IsReadOnlyAndTellsNoListing) {
  Served served;
  const auto code = [](const auto& call) { return code_of(call); };
  EXPECT_EQ(code([&] { (void)served.store->list(); }), ErrorCode::unsupported);
  EXPECT_EQ(code([&] { (void)served.store->create("x", IfExists::fail); }), ErrorCode::unsupported);
  EXPECT_EQ(code([&] { served.store->remove("x"); }), ErrorCode::unsupported);
  EXPECT_TRUE(served.store->is_read_only());
  EXPECT_EQ(code([&] { (void)served.store->open("../x"); }), ErrorCode::unsafe);
  EXPECT_EQ(served.server.requests(), 0);
}

HttpResponse sent_on(const std::string& location, int status = 302) {
  HttpResponse response;
  response.status = status;
  response.headers["location"] = location;
  return response;
}

TEST(Redirect, LocationsMayBeRelative) {
  const std::string from = "https://h:8/a/b?q=1";
  EXPECT_EQ(redirect_of(from, sent_on("https://o/x?y")), "https://o/x?y");
  EXPECT_EQ(redirect_of(from, sent_on("//o/x#part")), "https://o/x");
  EXPECT_EQ(redirect_of(from, sent_on("/x?y")), "https://h:8/x?y");
  EXPECT_EQ(redirect_of(from, sent_on("c")), "https://h:8/a/c");
  EXPECT_EQ(redirect_of("https://h", sent_on("c")), "https://h/c");
  EXPECT_EQ(redirect_of(from, sent_on("")), std::nullopt);
  EXPECT_EQ(redirect_of(from, sent_on("/x", 304)), std::nullopt);
  EXPECT_EQ(redirect_of(from, sent_on("/x", 200)), std::nullopt);
}

TEST(Redirect, NeverLeadsDownwards) {
  const auto code = [](const std::string& from, const std::string& to) {
    return code_of([&] { (void)redirect_of(from, sent_on(to)); });
  };
  EXPECT_EQ(code("https://h/a?sig=5ecret", "http://h/a"), ErrorCode::unsafe);
  EXPECT_EQ(code("https://h/a", "HTTP://h/a"), ErrorCode::unsafe);
  EXPECT_EQ(code("https://h/a", "https://localhost/a"), ErrorCode::unsafe);
  EXPECT_EQ(code("http://h/a", "http://127.0.0.1/a"), ErrorCode::unsafe);
}

// They are the server's fault, not the caller's; what they say may be secret.
TEST(Redirect, LocationsThatAreNoAddressesAreCorrupt) {
  for (const std::string from : {"https://h/a?sig=1", "http://h/a"}) {
    for (const char* to : {"https://u:5ecret@o/x", "https://h\\@o/5ecret", "https://o/5ecret y",
                           "https://o/\xc3\xbc", "/5ecret\ty", "https://o:5ecret/", "https://",
                           "//", "file:///etc/5ecret", "s5ecret://o/"}) {
      const Error error = error_of([&] { (void)redirect_of(from, sent_on(to)); });
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << to;
      EXPECT_EQ(error.path(), from.substr(0, from.find('?'))) << to;
      EXPECT_THAT(error.what(), Not(HasSubstr("5ecret"))) << to;
    }
  }
}

TEST(HttpStore, RedirectsAreFollowed) {
  Served served;
  const std::string real = served.server.url("/dir/a%20b");
  // /x leads to /xx of this server, that to another one, and that by names alone to the object.
  LoopbackServer further([&](int, const std::string& request) {
    const std::string asked = target(request);
    const std::string next = asked == "/deep/xxxxx" ? real : asked.substr(6) + "x";
    return scripted(307, {}, "Location: " + next + "\r\n");
  });
  LoopbackServer front([&](int, const std::string& request) {
    const bool is_first = target(request) == "/x";
    return scripted(301, {}, "Location: " + (is_first ? "/xx" : further.url("/deep/xxx")) + "\r\n");
  });
  const auto source = http_store(parse_uri(front.url()), quick_client())->open("x");
  EXPECT_EQ(read(*source, 3, 2), "34");
  EXPECT_EQ(field(served.server.request(2), "Range"), "bytes=3-4");
  EXPECT_EQ(source->name(), front.url("/x"));
}

TEST(HttpStore, LoopsOfRedirectsEnd) {
  LoopbackServer server(
      [](int, const std::string&) { return scripted(302, {}, "Location: /again\r\n"); });
  const auto store = http_store(parse_uri(server.url()), quick_client());
  const Error error = error_of([&] { (void)store->open("x"); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_THAT(error.what(), HasSubstr("more than 5 times"));
  EXPECT_EQ(server.requests(), 6);
}

}  // namespace
}  // namespace tessera
