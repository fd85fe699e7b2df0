// Servers that lie: one Error, soon, and in little memory (docs/hostile-cases.md, H).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/errors.h"
#include "conformance/loopback_server.h"
#include "storage/http/pages.h"
#include "storage/http/uri.h"
#include "storage/s3/bucket.h"
#include "storage/s3/s3_store.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

class HostileServer : public testing::Test {
 protected:
  HostileServer() {
    ::setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
    ::setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret", 1);
  }
  ~HostileServer() override { ::unsetenv("AWS_ENDPOINT_URL"); }

  // Answers each request by what `script` says to it.
  Store& store(const std::function<std::string(int number, const std::string& request)>& script) {
    server_ = std::make_unique<LoopbackServer>([script](int number, const std::string& request) {
      return Scripted{script(number, request), Then::close};
    });
    ::setenv("AWS_ENDPOINT_URL", server_->url("").c_str(), 1);
    HttpOptions options{.slow_for = deadline_, .operation_within = deadline_, .first_pause = 1ms};
    client_ = std::make_shared<HttpClient>(options);
    store_ = s3_store(parse_bucket_uri("s3://b/p"), client_);
    return *store_;
  }
  Store& always(const std::string& answer) {
    return store([answer](int, const std::string&) { return answer; });
  }

  std::chrono::seconds deadline_{1};
  std::unique_ptr<LoopbackServer> server_;
  std::shared_ptr<HttpClient> client_;
  std::shared_ptr<Store> store_;
};

std::string head_of(const std::string& headers) {
  return "HTTP/1.1 200 OK\r\n" + headers + "\r\n";
}

// Whatever HEAD says of an object, it is one error, or an object of that size of which nobody reads
// more than its answers have.
TEST_F(HostileServer, H04SizesThatHeadTells) {
  const std::string etag = "ETag: \"e\"\r\n";
  for (const std::string& length :
       {std::string(), std::string("Content-Length: -1\r\n"),
        std::string("Content-Length: 99999999999999999999\r\n"),
        std::string("Content-Length: 5\r\nContent-Length: 6\r\n"),
        std::string("Content-Length: 0x10\r\n"), std::string("Content-Length: 5, 5\r\n")}) {
    const Error error = error_of([&] { (void)always(head_of(etag + length)).open("a")->size(); });
    EXPECT_THAT(error.code(), testing::AnyOf(ErrorCode::corrupt, ErrorCode::io, ErrorCode::timeout))
        << length;
  }
  Store& huge = store([&](int, const std::string& request) {
    if (request.starts_with("HEAD"))
      return head_of(etag + "Content-Length: 9223372036854775807\r\n");
    return http_answer(206, "hello", etag + "Content-Range: bytes 0-4/9223372036854775807\r\n");
  });
  const auto source = huge.open("a");
  EXPECT_EQ(code_of([&] { (void)read_all(*source, 1 << 20); }), ErrorCode::limit);
  std::vector<std::byte> out(5);
  source->read_at(0, out);
}

TEST_F(HostileServer, H07VersionsThatAreNone) {
  const auto told = [](const std::string& etag) {
    return head_of("Content-Length: 5\r\nETag: " + etag + "\r\n");
  };
  for (const std::string& etag : {"\"" + std::string(60'000, 'e') + "\"", std::string("\"a\x01z\""),
                                  std::string("\"a\x7f\"")}) {
    EXPECT_EQ(code_of([&] { (void)always(told(etag)).open("a"); }), ErrorCode::corrupt);
  }
  EXPECT_EQ(code_of([&] { (void)always(head_of("Content-Length: 5\r\n")).open("a"); }),
            ErrorCode::unsupported);
}

std::string listing(const std::string& content) {
  return http_answer(200, "<ListBucketResult>" + content + "</ListBucketResult>");
}
std::string object(const std::string& key, const std::string& etag = "e") {
  return "<Contents><Key>" + key + "</Key><Size>5</Size><ETag>" + etag + "</ETag></Contents>";
}
std::string followed_by(const std::string& token) {
  return "<IsTruncated>true</IsTruncated><NextContinuationToken>" + token +
         "</NextContinuationToken>";
}

TEST_F(HostileServer, H08ListingsWithoutEnd) {
  Store& circle = store([](int number, const std::string&) {
    return listing(object("p/a") + followed_by(number % 2 == 0 ? "even" : "odd"));
  });
  EXPECT_EQ(code_of([&] { (void)circle.list(); }), ErrorCode::corrupt);
  EXPECT_EQ(server_->requests(), 3);

  Pages pages("objects", "s3://b");
  const auto turn_all = [&] {
    for (std::size_t i = 0; i <= Pages::kMostPages; ++i) pages.turn(std::to_string(i), 0);
  };
  EXPECT_EQ(code_of(turn_all), ErrorCode::limit);
  Pages large("objects", "s3://b");
  large.turn("a", Pages::kMostEntries);
  EXPECT_EQ(code_of([&] { large.turn("b", 1); }), ErrorCode::limit);
}

TEST_F(HostileServer, H09KeysThatNobodyAskedFor) {
  EXPECT_EQ(code_of([&] { (void)always(listing(object("elsewhere"))).list(); }),
            ErrorCode::corrupt);
  EXPECT_EQ(code_of([&] { (void)always(listing(object("q/a"))).list(); }), ErrorCode::corrupt);
  const std::string odd = object("p/") + object("p/../x") + object("p//x") + object("p/a/../../x") +
                          object("p/./x") + object("p/good");
  const auto found = always(listing(odd)).list();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "good");
  EXPECT_EQ(code_of([&] { (void)always(listing(object("p/a", std::string(5000, 'e')))).list(); }),
            ErrorCode::corrupt);
  EXPECT_EQ(code_of([&] { (void)always(listing(object("p/a", "e&#10;f"))).list(); }),
            ErrorCode::corrupt);
}

// Some servers leave the quotes of an ETag out of listings, or everywhere.
TEST_F(HostileServer, AnETagWithoutQuotesIsOneWithThem) {
  for (const std::string& told : {std::string("e"), std::string("\"e\"")}) {
    Store& of = store([told](int, const std::string& request) {
      if (request.starts_with("HEAD"))
        return head_of("Content-Length: 5\r\nETag: " + told + "\r\n");
      if (request.find("list-type") != std::string::npos) return listing(object("p/a", "e"));
      const bool matches = request.find("If-Match: \"e\"\r\n") != std::string::npos;
      if (!matches) return http_answer(412, "");
      return http_answer(206, "ell", "Content-Range: bytes 1-3/5\r\nETag: " + told + "\r\n");
    });
    std::vector<std::byte> out(3);
    of.open_listed(of.list().at(0))->read_at(1, out);
    EXPECT_EQ(static_cast<char>(out[2]), 'l');
    of.open("a")->read_at(1, out);
    EXPECT_EQ(of.open("a")->version(), of.open_listed(of.list().at(0))->version());
  }
}

// Five bytes at offset 10 of an object of 100 are asked for; no answer is right for those.
TEST_F(HostileServer, H06RangesOfAnotherObject) {
  const auto read = [&](const std::string& answer) {
    Store& of = store([answer](int, const std::string& request) {
      return request.starts_with("HEAD") ? head_of("Content-Length: 100\r\nETag: \"e\"\r\n")
                                         : answer;
    });
    std::vector<std::byte> out(5);
    return code_of([&] { of.open("a")->read_at(10, out); });
  };
  const auto partial = [](const std::string& range) {
    return http_answer(206, "hello", "Content-Range: " + range + "\r\n");
  };
  for (const char* range :
       {"bytes 10-14/99", "bytes 10-14/101", "bytes 10-15/100", "bytes 9-13/100", "bytes 10-14",
        "bytes -14/100", "10-14/100", "bytes 18446744073709551626-14/100", ""})
    EXPECT_EQ(read(partial(range)), ErrorCode::corrupt) << range;
  EXPECT_EQ(read(http_answer(204, "")), ErrorCode::corrupt);
}

TEST_F(HostileServer, H14ChunksThatLie) {
  const std::string chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
  std::string trailers = "0\r\n";
  for (int i = 0; i < 5000; ++i) trailers += "x" + std::to_string(i) + ": y\r\n";
  for (const std::string& body :
       {std::string("FFFFFFFFFFFFFFFFF\r\nx"), std::string("-5\r\nhello\r\n0\r\n\r\n"),
        std::string("zz\r\n"), std::string("5\r\nhel"), trailers}) {
    const auto code = code_of([&] { (void)always(chunked + body).list(); });
    EXPECT_THAT(code, testing::AnyOf(ErrorCode::corrupt, ErrorCode::io, ErrorCode::timeout))
        << body.substr(0, 20);
  }
}

TEST_F(HostileServer, H11RedirectsOfABucket) {
  for (const char* region : {"evil.example.com/", "", "us-east-1@evil", "a b", "..", "EU"}) {
    const std::string elsewhere = http_answer(
        301, "<Error><Code>PermanentRedirect</Code></Error>",
        "Location: http://evil.example.com/\r\nx-amz-bucket-region: " + std::string(region) +
            "\r\n");
    const Error error = error_of([&] { (void)always(elsewhere).open("a"); });
    EXPECT_NE(error.code(), ErrorCode::not_found) << region;
    EXPECT_LE(server_->requests(), 2) << region;
  }
}

// What cannot be aborted either is for `gc`: its mark was sent, or its name tells whose it is.
TEST_F(HostileServer, AFailedUploadTellsItsOwnError_O27) {
  deadline_ = 60s;  // it takes a part of 8 MiB slowly
  Store& denying = store([](int, const std::string& request) {
    const auto denied = [](const std::string& code) {
      return http_answer(403, "<Error><Code>" + code + "</Code></Error>");
    };
    if (request.find("?uploads") != std::string::npos) {
      return http_answer(200,
                         "<InitiateMultipartUploadResult><UploadId>7</UploadId>"
                         "</InitiateMultipartUploadResult>");
    }
    return denied(request.starts_with("DELETE") ? "NoDelete" : "NoPart");
  });
  const std::vector<std::byte> part(9 << 20);
  auto sink = denying.create("a", IfExists::replace, 20 << 20);
  const Error error = error_of([&] { sink->write_at(0, part), sink->commit(); });
  EXPECT_NE(std::string(error.what()).find("NoPart"), std::string::npos) << error.what();
  sink.reset();  // nor does this throw
}

TEST_F(HostileServer, H13ErrorsThatAreNotText) {
  const std::string body =
      "<Error><Code>\x1b[31mBad</Code><Message>" + std::string(1 << 20, 'm') + "</Message></Error>";
  const Error error = error_of(
      [&] { (void)always(http_answer(400, body, "x-amz-request-id: \x1b]0;x\r\n")).list(); });
  const std::string text = error.what();
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_LT(text.size(), 2000U);
}

}  // namespace
}  // namespace tessera
