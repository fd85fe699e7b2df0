// What servers say that those of tests/stores do not, played by a script.
#include "storage/s3/bucket.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <span>

#include "base/parallel.h"
#include "conformance/errors.h"
#include "conformance/loopback_server.h"
#include "storage/s3/s3_sink.h"
#include "storage/s3/s3_store.h"
#include "storage/s3/scripted_server.h"

namespace tessera::s3 {
namespace {

std::string bucket_answer(const std::string& status, const std::string& body,
                          const std::string& headers = {}) {
  return "HTTP/1.1 " + status + "\r\nConnection: close\r\nx-amz-request-id: REQ7\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}
std::string error_body(const std::string& code) {
  return "<Error><Code>" + code + "</Code><Message>so it is</Message></Error>";
}
std::string bucket_refusal(const std::string& status, const std::string& code,
                           const std::string& headers = {}) {
  return bucket_answer(status, error_body(code), headers);
}
// The answer to a HEAD: a length without a body.
std::string head_answer(const std::string& attempt, std::size_t size = 5) {
  return "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " + std::to_string(size) +
         "\r\nETag: \"e\"\r\nx-amz-meta-tessera-attempt: " + attempt + "\r\n\r\n";
}
std::string refusal_of_head(const std::string& status) {
  return "HTTP/1.1 " + status + "\r\nConnection: close\r\n\r\n";
}
const std::string kDone =
    bucket_answer("200 OK", "", "ETag: \"e\"\r\nx-amz-checksum-crc32: NhCmhg==\r\n");  // of "hello"
const std::string kPartDone = bucket_answer("200 OK", "", "ETag: \"e\"\r\n");
const std::string kCompleted = bucket_answer(
    "200 OK", "<CompleteMultipartUploadResult><Key>k</Key></CompleteMultipartUploadResult>");
const std::string kOurs(ScriptedServer::kAttempt);
const std::string kMissing = refusal_of_head("404 Not Found");

class S3Answers : public testing::Test {
 protected:
  S3Answers() {
    ::setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
    ::setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret", 1);
  }
  // The bucket of a server with that script.
  Bucket& bucket(std::vector<std::string> answers) {
    server_.emplace(std::move(answers));
    const Settings settings{.endpoint = server_->url(),
                            .region = "us-east-1",
                            .profile = {},
                            .bucket = "b",
                            .prefix = {},
                            .is_path_style = true};
    HttpOptions options;
    options.first_pause = std::chrono::milliseconds(1);
    options.operation_within = std::chrono::seconds(20);
    bucket_ = std::make_shared<Bucket>("s3://b", settings, std::make_shared<HttpClient>(options));
    return *bucket_;
  }
  Written put_hello() { return bucket_->put("k", hello_, {.is_absent = true}, "mine"); }
  // A sink that has the bytes.
  std::unique_ptr<ByteSink> written_sink() {
    auto sink = s3_sink(bucket_, "k", {.is_absent = true}, hello_.size());
    sink->write_at(0, hello_);
    return sink;
  }
  [[nodiscard]] std::string request(std::size_t i) { return server_->requests().at(i); }
  [[nodiscard]] bool has(std::size_t i, const std::string& text) {
    return request(i).find(text) != std::string::npos;
  }

  const std::string text_ = "hello";
  const ByteView hello_ = std::as_bytes(std::span(text_));
  std::optional<ScriptedServer> server_;
  std::shared_ptr<Bucket> bucket_;
};

TEST_F(S3Answers, AnExpiredTokenIsAskedForAnew_O15) {
  bucket({bucket_refusal("400 Bad Request", "ExpiredToken"), kDone});
  EXPECT_EQ(put_hello(), Written::done);
  EXPECT_EQ(server_->requests().size(), 2U);
}

TEST_F(S3Answers, ASkewedClockIsSetByTheServer_O15) {
  bucket({bucket_refusal("403 Forbidden", "RequestTimeTooSkewed",
                         "Date: Wed, 25 Nov 2043 03:00:00 GMT\r\n"),
          kDone});
  EXPECT_EQ(put_hello(), Written::done);
  EXPECT_FALSE(has(0, "20431125T0"));
  EXPECT_TRUE(has(1, "20431125T0"));
}

// The answer to a HEAD has no body that says why it is refused: a GET is asked, and then again.
TEST_F(S3Answers, WhatAHeadIsRefusedForIsMendedToo_O15) {
  const std::string skewed = "Date: Wed, 25 Nov 2043 03:00:00 GMT\r\n";
  const std::string byte =
      bucket_answer("206 Partial Content", "h", "Content-Range: bytes 0-0/5\r\n");
  bucket({refusal_of_head("403 Forbidden"),
          bucket_refusal("403 Forbidden", "RequestTimeTooSkewed", skewed), byte, head_answer("a")});
  EXPECT_EQ(bucket_->head("k")->attempt, "a");
  EXPECT_TRUE(has(1, "GET /b/k "));
  EXPECT_FALSE(has(1, "20431125T0"));
  EXPECT_TRUE(has(2, "20431125T0"));
  EXPECT_TRUE(has(3, "HEAD /b/k "));
  EXPECT_TRUE(has(3, "20431125T0"));

  bucket({refusal_of_head("400 Bad Request"), bucket_refusal("400 Bad Request", "ExpiredToken"),
          byte, head_answer("a")});
  EXPECT_EQ(bucket_->head("k")->attempt, "a");
  bucket({refusal_of_head("403 Forbidden"),
          bucket_refusal("403 Forbidden", "RequestTimeTooSkewed", skewed),
          bucket_refusal("416 Range Not Satisfiable", "InvalidRange"), head_answer("a", 0)});
  EXPECT_EQ(bucket_->head("k")->size, 0U);
}

TEST_F(S3Answers, AHeadThatIsRefusedTellsWhy_O30) {
  bucket({refusal_of_head("403 Forbidden"), bucket_refusal("403 Forbidden", "InvalidAccessKeyId")});
  const std::string text = error_of([&] { (void)bucket_->head("k"); }).what();
  for (const char* told : {"HEAD ", "403", "InvalidAccessKeyId: so it is", "s3:ListBucket"})
    EXPECT_NE(text.find(told), std::string::npos) << told << " in " << text;
}

TEST_F(S3Answers, AnotherRegionIsTriedOnce_O16) {
  const std::string elsewhere = bucket_refusal("301 Moved Permanently", "PermanentRedirect",
                                               "x-amz-bucket-region: eu-west-1\r\n");
  bucket({elsewhere, kDone, kDone});
  EXPECT_EQ(put_hello(), Written::done);
  EXPECT_EQ(put_hello(), Written::done);  // remembered
  EXPECT_TRUE(has(0, "/us-east-1/s3/"));
  EXPECT_TRUE(has(1, "/eu-west-1/s3/"));
  EXPECT_TRUE(has(2, "/eu-west-1/s3/"));

  bucket({elsewhere,
          bucket_refusal("301 Moved Permanently", "PermanentRedirect",
                         "x-amz-bucket-region: eu-west-2\r\n"),
          kMissing});
  EXPECT_EQ(code_of([&] { (void)put_hello(); }), ErrorCode::io);
}

TEST_F(S3Answers, ABodyThatIsDamagedThreeTimesIsCorrupt_O23) {
  const std::string bad = bucket_refusal("400 Bad Request", "BadDigest");
  bucket({bad, bad, kDone});
  EXPECT_EQ(put_hello(), Written::done);
  bucket({bad, bad, bad, kMissing});
  const Error error = error_of([&] { (void)put_hello(); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_NE(error.message().find("memory of this host or the network"), std::string::npos);
}

TEST_F(S3Answers, ADenialNamesTheVerbThatIsLacking_O30) {
  const Bucket& denying = bucket({bucket_refusal("403 Forbidden", "AccessDenied")});
  const Error error = error_of([&] { (void)put_hello(); });
  EXPECT_EQ(error.path(), denying.path_of("k"));
  const std::string text = error.what();
  for (const std::string& told :
       {"PUT " + server_->url() + "/b/k", std::string("403"), std::string("REQ7"),
        std::string("AccessDenied"), std::string("s3:PutObject")})
    EXPECT_NE(text.find(told), std::string::npos) << told << " in " << text;
  EXPECT_EQ(text.find("hidden-secret"), std::string::npos);
}

TEST_F(S3Answers, AnErrorInsideOfA200IsOne_O09) {
  const std::vector<CompletedPart> parts = {{.number = 1, .etag = "\"e\"", .crc32 = {}}};
  const std::string again = bucket_answer("200 OK", error_body("InternalError"));
  const auto complete = [&] { return bucket_->complete({"k", "id"}, parts, {}, {"k", "a", 5}); };
  bucket({again, again, kCompleted});
  EXPECT_EQ(complete(), Written::done);
  bucket({bucket_answer("200 OK", error_body("InvalidPart")), kMissing});
  EXPECT_EQ(code_of([&] { (void)complete(); }), ErrorCode::io);
}

// What a proxy gives, what was cut, and what is about another request, each of a good status.
TEST_F(S3Answers, AnAnswerThatIsNoneIsNoSuccess_O09) {
  const std::vector<CompletedPart> parts = {{.number = 1, .etag = "\"e\"", .crc32 = {}}};
  const auto complete = [&] { return bucket_->complete({"k", "id"}, parts, {}, {"k", "a", 5}); };
  for (const std::string& strange :
       {bucket_answer("200 OK", ""), bucket_answer("204 No Content", ""),
        bucket_answer("200 OK", "<html>wait</html>"),
        bucket_answer("200 OK", "   <Error><Code>InternalErr"),
        bucket_answer("200 OK", "<CompleteMultipartUplo"),
        bucket_answer("200 OK", "<CompleteMultipartUploadResult><Key>k</Key>"),
        bucket_answer(
            "200 OK",
            "<CompleteMultipartUploadResult><Key>l</Key></CompleteMultipartUploadResult>"),
        bucket_answer("200 OK",
                      "<CompleteMultipartUploadResults></CompleteMultipartUploadResults>")}) {
    bucket({strange, kCompleted});
    EXPECT_EQ(complete(), Written::done) << strange;
    bucket({strange, strange, strange, head_answer("a")});
    EXPECT_EQ(complete(), Written::done) << strange;
    bucket({strange, strange, strange, head_answer("another")});
    const Error error = error_of([&] { (void)complete(); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt) << strange;
    EXPECT_NE(error.message().find("no answer of S3"), std::string::npos) << error.message();
    bucket({strange, strange, strange, head_answer("a", 4)});
    EXPECT_EQ(code_of([&] { (void)complete(); }), ErrorCode::corrupt) << strange;
  }
}

TEST_F(S3Answers, ABodyIsWrittenWhereTheServerSaysItOrHasIt_O09) {
  const std::string html = bucket_answer("200 OK", "<html></html>", "ETag: \"e\"\r\n");
  const std::string of_others =
      bucket_answer("200 OK", "", "ETag: \"e\"\r\nx-amz-checksum-crc32: AAAAAA==\r\n");
  const std::string empty = bucket_answer("200 OK", "");
  for (const std::string& strange : {html, of_others, empty}) {
    bucket({strange, kDone});
    EXPECT_EQ(put_hello(), Written::done) << strange;
    bucket({strange, strange, strange, head_answer("mine")});
    EXPECT_EQ(put_hello(), Written::done) << strange;
    bucket({strange, strange, strange, kMissing});
    EXPECT_EQ(code_of([&] { (void)put_hello(); }), ErrorCode::corrupt) << strange;
  }
  // No checksum comes back: the answer may be that to another PUT.
  bucket({kPartDone, head_answer("mine")});
  EXPECT_EQ(put_hello(), Written::done);
  for (const std::string& found : {kMissing, head_answer("another"), head_answer("mine", 4)}) {
    bucket({kPartDone, found});
    EXPECT_EQ(code_of([&] { (void)put_hello(); }), ErrorCode::corrupt) << found;
  }
}

TEST_F(S3Answers, ACopyIsThereWhereItsAnswerIsNone_O09) {
  const CopiedObject from{.bucket = "b", .key = "f", .etag = "\"e\""};
  const auto copy = [&] { bucket_->copy(from, {"k", "a", 5}); };
  const std::string html = bucket_answer("200 OK", "<html></html>");
  const std::string copied =
      bucket_answer("200 OK", "<CopyObjectResult><ETag>\"e\"</ETag></CopyObjectResult>");
  const std::string another =
      bucket_answer("200 OK", "<CopyObjectResult><ETag>\"f\"</ETag></CopyObjectResult>");
  bucket({html, copied});
  copy();
  bucket({html, html, html, head_answer("a")});
  copy();
  bucket({html, html, html, kMissing});
  EXPECT_EQ(code_of(copy), ErrorCode::corrupt);
  bucket({another, head_answer("a")});  // an encrypted copy has another ETag than the object
  copy();
  bucket({another, kMissing});
  EXPECT_EQ(code_of(copy), ErrorCode::corrupt);
}

TEST_F(S3Answers, OtherRequestsTakeNoPageOfAProxy_O09) {
  const std::string html = bucket_answer("200 OK", "<html></html>");
  bucket({html, bucket_answer("200 OK", "<ListBucketResult></ListBucketResult>")});
  bucket_->list("", false, [](const Listing&) {});
  bucket({html, html, html});
  EXPECT_EQ(code_of([&] { bucket_->list("", false, [](const Listing&) {}); }), ErrorCode::corrupt);
  bucket({html, bucket_answer("204 No Content", "")});
  bucket_->remove("k");
  bucket({html, html, html});
  EXPECT_EQ(code_of([&] { bucket_->remove("k"); }), ErrorCode::corrupt);
  const std::string of_another =
      bucket_answer("200 OK",
                    "<InitiateMultipartUploadResult><Key>l</Key><UploadId>1</UploadId>"
                    "</InitiateMultipartUploadResult>");
  bucket({of_another, of_another, of_another});
  EXPECT_EQ(code_of([&] { (void)bucket_->create_upload("k", "a", PartsAre::sent); }),
            ErrorCode::corrupt);
  std::vector<std::byte> out(5);
  const ObjectState version{.size = 5, .etag = "\"e\"", .attempt = {}, .version = {}};
  bucket({bucket_answer("200 OK", "hello")});
  EXPECT_EQ(code_of([&] { bucket_->read("k", version, 0, MutableByteView(out)); }),
            ErrorCode::corrupt);
}

TEST_F(S3Answers, AConflictIsTriedAgain_O12) {
  bucket({bucket_refusal("409 Conflict", "ConditionalRequestConflict"), kDone});
  EXPECT_EQ(put_hello(), Written::done);
}

// The first request is applied and its answer lost; the second finds what that left.
TEST_F(S3Answers, ARefusalIsComparedWithWhatWasWritten_O11) {
  const std::string refused = bucket_refusal("412 Precondition Failed", "PreconditionFailed");
  bucket({"", refused, head_answer(kOurs)});
  written_sink()->commit();
  bucket({"", refused, head_answer("another")});
  EXPECT_EQ(code_of([&] { written_sink()->commit(); }), ErrorCode::already_exists);
}

TEST_F(S3Answers, ACompletedUploadThatIsGoneIsComparedWithTheObject_O10) {
  const std::string created = bucket_answer("200 OK",
                                            "<InitiateMultipartUploadResult><UploadId>id</UploadId>"
                                            "</InitiateMultipartUploadResult>");
  const std::string gone = bucket_refusal("404 Not Found", "NoSuchUpload");
  const std::vector<std::byte> bytes(kSmallestPart + 1);
  for (const std::string& attempt : {kOurs, std::string("another")}) {
    std::vector<std::string> answers = {created,   kPartDone, kPartDone,
                                        kPartDone,  // two parts and the mark
                                        "",        gone,      head_answer(attempt, bytes.size())};
    if (attempt != kOurs) answers.push_back(head_answer(attempt, bytes.size()));
    answers.push_back(kMissing);
    bucket(std::move(answers));
    auto sink = s3_sink(bucket_, "k", {.is_absent = true}, bytes.size());
    sink->write_at(0, bytes);
    if (attempt == kOurs) {
      sink->commit();
    } else {
      EXPECT_EQ(code_of([&] { sink->commit(); }), ErrorCode::conflict);
    }
    sink.reset();
    EXPECT_FALSE(bucket_->head("l"));  // what comes next: nothing is aborted, that is there no more
    EXPECT_TRUE(has(4, "POST /b/k?uploadId=id "));
    EXPECT_TRUE(has(6, "HEAD /b/k "));
    EXPECT_EQ(server_->requests().back().substr(0, 10), "HEAD /b/l ");
  }
}

// The answer to the first attempt is lost while the server works on it: a second one is told that
// there is no such upload, and the object comes later.
TEST_F(S3Answers, AnUploadThatIsWorkedOnIsWaitedFor_O10) {
  const std::vector<CompletedPart> parts = {{.number = 1, .etag = "\"e\"", .crc32 = {}}};
  const std::string gone = bucket_refusal("404 Not Found", "NoSuchUpload");
  const auto complete = [&](bool is_new) {
    return bucket_->complete({"k", "id"}, parts, {}, {"k", "a", 5, is_new});
  };
  bucket({"", gone, kMissing, kMissing, kMissing, head_answer("a")});
  EXPECT_EQ(complete(true), Written::done);
  bucket({"", gone, head_answer("old"), head_answer("old"), head_answer("old"), head_answer("a")});
  EXPECT_EQ(complete(false), Written::done);
  bucket({"", gone, head_answer("rival"), head_answer("rival")});
  EXPECT_EQ(complete(true), Written::gone);
  bucket({gone, kMissing});  // no attempt was lost
  EXPECT_EQ(complete(false), Written::gone);
}

// A copy by the server whose upload somebody has aborted: there is nothing to abort.
TEST_F(S3Answers, ACopyInPartsThatIsGoneIsNotAborted_O10) {
  bucket({kMissing,
          bucket_answer("200 OK",
                        "<InitiateMultipartUploadResult><UploadId>id</UploadId>"
                        "</InitiateMultipartUploadResult>"),
          kPartDone, bucket_answer("200 OK", "<CopyPartResult><ETag>\"e\"</ETag></CopyPartResult>"),
          bucket_refusal("404 Not Found", "NoSuchUpload"), kMissing, kMissing});
  const ServerCopy copy{.from = {.bucket = "b", .key = "f", .etag = "\"e\""},
                        .size = kSmallestPart + 1,
                        .to = "k",
                        .if_exists = IfExists::fail,
                        .copied = [](std::uint64_t) {}};
  EXPECT_EQ(code_of([&] { (void)copy_by_server(*bucket_, copy); }), ErrorCode::conflict);
  EXPECT_FALSE(bucket_->head("l"));
  EXPECT_EQ(server_->requests().back().substr(0, 10), "HEAD /b/l ");
}

// Longer than any other answer may take to begin.
TEST_F(S3Answers, AServerMayWorkForLong_O19) {
  LoopbackServer slow([](int, const std::string& request) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    if (request.starts_with("POST")) return Scripted{kCompleted, Then::close};
    const std::string copied = request.find("partNumber") == std::string::npos ? "Object" : "Part";
    return Scripted{bucket_answer("200 OK", "<Copy" + copied + "Result><ETag>\"e\"</ETag></Copy" +
                                                copied + "Result>"),
                    Then::close};
  });
  HttpOptions options;
  options.slow_for = std::chrono::seconds(1);
  options.operation_within = std::chrono::seconds(20);
  const Settings settings{.endpoint = slow.url(""),
                          .region = "us-east-1",
                          .profile = {},
                          .bucket = "b",
                          .prefix = {},
                          .is_path_style = true};
  Bucket bucket("s3://b", settings, std::make_shared<HttpClient>(options));
  const CopiedObject from{.bucket = "b", .key = "f", .etag = "\"e\""};
  const std::vector<CompletedPart> parts = {{.number = 1, .etag = "\"e\"", .crc32 = {}}};
  const std::vector<std::function<void()>> works = {
      [&] {
        bucket.copy(from, {"k", "a", 5});
      },
      [&] {
        (void)bucket.copy_part({"k", "id"}, 1, from, 0, 5);
      },
      [&] {
        EXPECT_EQ(bucket.complete({"k", "id"}, parts, {}, {"k", "a", 5}), Written::done);
      }};
  parallel_for(3, works.size(), [&](std::size_t i) { works[i](); });
  EXPECT_EQ(slow.requests(), 3);
}

TEST_F(S3Answers, AMarkThatIsRefusedDoesNotKeepTheObject_O26) {
  bucket({bucket_refusal("400 Bad Request", "InvalidPart")});
  bucket_->mark({"k", "id"}, PartsAre::sent);
  EXPECT_TRUE(has(0, "PUT /b/k?partNumber=10000&uploadId=id "));
}

TEST_F(S3Answers, APageOfPartsThatComesAgainIsCorrupt_O26) {
  const auto page = [](int part, int next) {
    return bucket_answer("200 OK",
                         "<ListPartsResult><IsTruncated>true</IsTruncated><NextPartNumberMarker>" +
                             std::to_string(next) + "</NextPartNumberMarker><Part><PartNumber>" +
                             std::to_string(part) + "</PartNumber><Size>1</Size></Part>" +
                             "</ListPartsResult>");
  };
  bucket({page(1, 1), page(2, 1)});
  EXPECT_EQ(code_of([&] { (void)bucket_->list_parts({"k", "id"}); }), ErrorCode::corrupt);
  EXPECT_TRUE(has(1, "part-number-marker=1"));
  bucket({bucket_refusal("404 Not Found", "NoSuchUpload")});
  EXPECT_TRUE(bucket_->list_parts({"k", "id"}).empty());
}

TEST_F(S3Answers, ADirtyRangeIsNotTaken_O08) {
  std::vector<std::byte> out(5);
  const ObjectState version{.size = 100, .etag = "\"e\"", .attempt = {}, .version = {}};
  const auto read = [&] { bucket_->read("k", version, 10, MutableByteView(out)); };
  bucket({bucket_answer("206 Partial Content", "hello", "Content-Range: bytes 11-15/100\r\n")});
  EXPECT_EQ(code_of(read), ErrorCode::corrupt);
  bucket({bucket_answer("200 OK", "hello")});
  EXPECT_EQ(code_of(read), ErrorCode::corrupt);
  bucket({bucket_answer("206 Partial Content", "hello",
                        "ETag: \"f\"\r\nContent-Range: bytes 10-14/100\r\n")});
  EXPECT_EQ(code_of(read), ErrorCode::conflict);
  bucket({bucket_answer("206 Partial Content", "hello", "Content-Range: bytes 10-14/100\r\n")});
  read();
}

TEST_F(S3Answers, APageThatComesAgainEndsTheList) {
  const std::string page =
      bucket_answer("200 OK",
                    "<ListBucketResult><IsTruncated>true</IsTruncated>"
                    "<NextContinuationToken>t</NextContinuationToken></ListBucketResult>");
  bucket({page, page});
  EXPECT_EQ(code_of([&] { bucket_->list("", false, [](const Listing&) {}); }), ErrorCode::corrupt);
}

TEST_F(S3Answers, AnAbsentObjectHasNoState) {
  bucket({kMissing});
  EXPECT_FALSE(bucket_->head("k"));
}

}  // namespace
}  // namespace tessera::s3
