// A server as Google documents its XML API, where it differs from S3: it takes x-goog-* headers
// with GOOG4-HMAC-SHA256, and refuses a request that has both vendors' by 400; writes are
// conditional on generations; it gives no CRC-32 back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "base/text.h"
#include "conformance/errors.h"
#include "conformance/loopback_server.h"
#include "storage/s3/s3_sink.h"
#include "storage/s3/s3_store.h"

namespace tessera::s3 {
namespace {

using testing::HasSubstr;

std::string field(const std::string& head, const std::string& name) {
  const std::size_t at = head.find("\r\n" + name + ": ");
  if (at == std::string::npos) return {};
  const std::size_t from = at + name.size() + 4;
  return head.substr(from, head.find("\r\n", from) - from);
}

class GoogleServer {
 public:
  std::string answer(const std::string& request) {
    const std::lock_guard lock(mutex_);
    const std::size_t end = request.find("\r\n\r\n");
    const std::string head = request.substr(0, end + 2), body = request.substr(end + 4);
    if (head.find("\r\nx-amz-") != std::string::npos)
      return refusal(400, "InvalidArgument",
                     "Requests cannot specify both x-amz and x-goog headers");
    if (!field(head, "authorization").starts_with("GOOG4-HMAC-SHA256 ") ||
        field(head, "authorization").find("/storage/goog4_request,") == std::string::npos ||
        field(head, "x-goog-date").empty() || field(head, "x-goog-content-sha256").size() != 64)
      return refusal(403, "SignatureDoesNotMatch", "as it is documented");
    const std::string method = head.substr(0, head.find(' '));
    const std::string target =
        head.substr(method.size() + 1, head.find(" HTTP") - method.size() - 1);
    return answer_to(method, target, head, body);
  }

 private:
  struct Object {
    std::string body, attempt;
    int generation = 0;
  };

  static std::string refusal(int status, const std::string& code, const std::string& message) {
    return http_answer(
        status, "<Error><Code>" + code + "</Code><Message>" + message + "</Message></Error>");
  }
  static std::string etag(const Object& object) {
    return "ETag: \"g" + std::to_string(object.generation) + "\"\r\n";
  }

  std::string answer_to(const std::string& method, const std::string& target,
                        const std::string& head, const std::string& body) {
    const std::string key = target.substr(0, target.find('?'));
    if (target.find("list-type") != std::string::npos)
      return http_answer(200, "<ListBucketResult></ListBucketResult>");
    if (target.ends_with("?uploads=")) {
      upload_ = {"", field(head, "x-goog-meta-tessera-attempt")};
      return http_answer(200,
                         "<InitiateMultipartUploadResult><UploadId>u</UploadId>"
                         "</InitiateMultipartUploadResult>");
    }
    if (method == "DELETE") {
      if (target.find("uploadId") == std::string::npos) objects_.erase(key);
      return http_answer(204, "");
    }
    if (target.find("partNumber=10000") != std::string::npos)
      return http_answer(200, "", "ETag: \"mark\"\r\n");
    if (target.find("partNumber") != std::string::npos) {
      upload_.body += body;  // they come one behind the other here
      return http_answer(200, "", "ETag: \"part\"\r\n");
    }
    const auto found = objects_.find(key);
    const int generation = found == objects_.end() ? 0 : found->second.generation;
    if (method == "HEAD") {
      if (generation == 0) return "HTTP/1.1 404 None\r\n\r\n";
      return "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(found->second.body.size()) +
             "\r\nx-goog-generation: " + std::to_string(generation) +
             "\r\nx-goog-meta-tessera-attempt: " + found->second.attempt + "\r\n" +
             etag(found->second) + "\r\n";
    }
    const std::string wanted = field(head, "x-goog-if-generation-match");
    if (!wanted.empty() && wanted != std::to_string(generation))
      return refusal(412, "PreconditionFailed", "another generation");
    const bool is_upload = method == "POST";
    objects_[key] = is_upload ? upload_ : Object{body, field(head, "x-goog-meta-tessera-attempt")};
    objects_[key].generation = ++generations_;
    if (!is_upload) return http_answer(200, "", etag(objects_[key]));
    return http_answer(200, "<CompleteMultipartUploadResult></CompleteMultipartUploadResult>");
  }

  std::mutex mutex_;
  std::map<std::string, Object> objects_;  // guarded by mutex_, as are the following
  Object upload_;
  int generations_ = 0;
};

class Google : public testing::Test {
 protected:
  Google() {
    ::setenv("AWS_ACCESS_KEY_ID", "GOOG1E", 1);
    ::setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret", 1);
  }
  void write(const std::string& key, std::size_t size, const Condition& condition) {
    const std::vector<std::byte> bytes(size, std::byte{7});
    const auto sink = s3_sink(bucket_, key, condition, size);
    sink->write_at(0, bytes);
    sink->commit();
  }

  GoogleServer google_;
  LoopbackServer server_{
      [this](int, const std::string& request) { return Scripted{google_.answer(request)}; }};
  const Settings settings_{.endpoint = server_.url(""),
                           .region = "auto",
                           .bucket = "b",
                           .is_path_style = true,
                           .is_google = true};
  const std::shared_ptr<Bucket> bucket_ =
      std::make_shared<Bucket>("gs://b", settings_, std::make_shared<HttpClient>());
};

TEST_F(Google, RequestsHaveHeadersOfOneKind_O11) {
  require_writable(*bucket_, "probe", false);
  EXPECT_FALSE(bucket_->head("probe"));
  for (const std::size_t size : {std::size_t{0}, std::size_t{100'000}, kSmallestPart + 1}) {
    const std::string key = "k" + std::to_string(size);
    write(key, size, {.is_absent = true});
    const auto first = bucket_->head(key);
    ASSERT_TRUE(first);
    EXPECT_EQ(first->size, size);
    EXPECT_EQ(code_of([&] { write(key, size, {.is_absent = true}); }), ErrorCode::already_exists);
    write(key, size, {.version = first->version});
    EXPECT_EQ(code_of([&] { write(key, size, {.version = first->version}); }), ErrorCode::conflict);
  }
}

// It knows conditions, so what it refuses by 400 is something else, which it says.
TEST_F(Google, ARefusalSaysWhatTheServerSays_O30) {
  LoopbackServer refusing([](int number, const std::string&) {
    return Scripted{number == 2 ? http_answer(400,
                                              "<Error><Code>InvalidArgument</Code>"
                                              "<Message>no such header</Message></Error>")
                                : http_answer(200, "", "ETag: \"e\"\r\n")};
  });
  Settings settings = settings_;
  settings.endpoint = refusing.url("");
  Bucket bucket("gs://b", settings, std::make_shared<HttpClient>());
  (void)bucket.head("k");
  const Error error = error_of([&] { (void)bucket.unheeded_condition("k"); });
  EXPECT_THAT(error.what(), HasSubstr("400"));
  EXPECT_THAT(error.what(), HasSubstr("InvalidArgument: no such header"));
}

}  // namespace
}  // namespace tessera::s3
