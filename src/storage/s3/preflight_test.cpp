#include "storage/s3/s3_store.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "conformance/errors.h"
#include "storage/s3/scripted_server.h"

namespace tessera::s3 {
namespace {

std::string answer(const std::string& status, const std::string& body = {}) {
  return "HTTP/1.1 " + status +
         "\r\nConnection: close\r\nETag: \"e\"\r\nx-amz-checksum-crc32: AAAAAA==\r\n" +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}
std::string refusal(const std::string& status, const std::string& code) {
  return answer(status, "<Error><Code>" + code + "</Code><Message>so it is</Message></Error>");
}
const std::string kMet = refusal("412 Precondition Failed", "PreconditionFailed");
const std::string kList = answer("200 OK", "<ListBucketResult></ListBucketResult>");
const std::string kUpload =
    answer("200 OK",
           "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>");
const std::string kGone = answer("204 No Content");

class S3Preflight : public testing::Test {
 protected:
  S3Preflight() {
    ::setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
    ::setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret", 1);
  }
  void try_writing(const std::vector<std::string>& answers, bool is_only_writer = false) {
    server_.emplace(answers);
    const Settings settings{.endpoint = server_->url(),
                            .region = "us-east-1",
                            .profile = {},
                            .bucket = "b",
                            .prefix = {},
                            .is_path_style = true};
    bucket_.emplace("s3://b", settings, std::make_shared<HttpClient>());
    require_writable(*bucket_, "probe", is_only_writer);
  }

  std::optional<ScriptedServer> server_;
  std::optional<Bucket> bucket_;
};

TEST_F(S3Preflight, TriesEachKindOfRequest_O30) {
  try_writing({answer("200 OK"), kMet, kMet, answer("200 OK"), kList, kUpload, kGone, kGone});
  std::vector<std::string> verbs;
  for (const std::string& request : server_->requests())
    verbs.push_back(request.substr(0, request.find(' ')));
  EXPECT_EQ(verbs, (std::vector<std::string>{"PUT", "PUT", "PUT", "HEAD", "GET", "POST", "DELETE",
                                             "DELETE"}));
}

TEST_F(S3Preflight, NamesTheRightThatIsLacking_O30) {
  const std::string denied = refusal("403 Forbidden", "AccessDenied");
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{denied, kGone}, "s3:PutObject"},
      {{answer("200 OK"), kMet, kMet, answer("200 OK"), denied, kGone}, "s3:ListBucket"},
      {{answer("200 OK"), kMet, kMet, answer("200 OK"), kList, kUpload, denied, kGone},
       "s3:AbortMultipartUpload"},
      {{answer("200 OK"), kMet, kMet, answer("200 OK"), kList, kUpload, kGone, denied, denied},
       "s3:DeleteObject"}};
  for (const auto& one : cases) {
    const Error error = error_of([&] { try_writing(one.first); });
    EXPECT_NE(std::string(error.what()).find(one.second), std::string::npos) << error.what();
    (void)server_->requests();
  }
}

TEST_F(S3Preflight, AServerThatIgnoresConditionsIsForOneWriter_O13_O14) {
  const std::vector<std::string> ignorant = {answer("200 OK"), answer("304 Not Modified"),
                                             refusal("501 Not Implemented", "NotImplemented"),
                                             refusal("400 Bad Request", "InvalidArgument")};
  for (const std::string& second : ignorant) {
    const Error error = error_of([&] { try_writing({answer("200 OK"), second, kGone}); });
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << second;
    EXPECT_NE(std::string(error.what()).find("--single-writer"), std::string::npos);
    const std::string status = second.substr(9, 3);
    EXPECT_NE(std::string(error.what()).find(": " + status), std::string::npos) << error.what();
    // A server that ignores If-Match alone is refused as well.
    EXPECT_EQ(code_of([&] {
                try_writing({answer("200 OK"), kMet, second, kGone});
              }),
              ErrorCode::unsupported);
    try_writing({answer("200 OK"), second, answer("200 OK"), kList, kUpload, kGone, kGone,
                 answer("200 OK")},
                true);
    EXPECT_EQ(bucket_->put("k", {}, {.is_absent = true}, "mine"), Written::done);
    EXPECT_EQ(server_->requests().back().find("If-None-Match"), std::string::npos);
  }
}

// Each step of a run tried for itself: eight requests in turn before every save.
TEST_F(S3Preflight, OneIsForADirectoryThoseBesideItAndThoseBelow) {
  const Settings settings{.endpoint = "http://127.0.0.1:1", .region = "us-east-1", .bucket = "b"};
  Bucket bucket("s3://b", settings, std::make_shared<HttpClient>());
  const auto tries = [&](const std::string& directory, const std::string& name = "write") {
    bool is_tried = false;
    bucket.once_around(directory, name, [&] { is_tried = true; });
    return is_tried;
  };
  EXPECT_THROW(bucket.once_around("a/run/step4/", "write", [] { throw 1; }), int);
  EXPECT_TRUE(tries("a/run/step4/"));
  for (const char* near : {"a/run/step4/", "a/run/step8/", "a/run/", "a/run/x/y/"})
    EXPECT_FALSE(tries(near)) << near;
  for (const char* far : {"a/running/x/", "a/", "b/", ""}) EXPECT_TRUE(tries(far)) << far;
  EXPECT_FALSE(tries("d/"));  // below the bucket
  EXPECT_TRUE(tries("a/run/step8/", "write alone"));
}

}  // namespace
}  // namespace tessera::s3
