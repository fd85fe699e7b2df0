// What a bucket does by itself and what it knows of its objects reach `copy` and `gc` also through
// a cache, and in a directory of a store (fault-rows O26).
#include <gmock/gmock.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "checkpoint/run/testing.h"
#include "conformance/loopback_server.h"
#include "conformance/temporary_directory.h"
#include "storage/cache/block_cache.h"
#include "storage/http/client.h"
#include "storage/http/uri.h"
#include "storage/s3/s3_store.h"
#include "tessera/copy.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// The bucket "b" of a server, with so much of S3 as a copy of one file and a look for leftovers ask
// for. All in it was written in 2020.
class SmallBucket {
 public:
  std::string answer(const std::string& request) {
    const std::lock_guard lock(mutex_);
    const std::size_t space = request.find(' ');
    const std::string method = request.substr(0, space);
    const std::string target =
        request.substr(space + 1, request.find(" HTTP") - space - 1).substr(3);  // "/b/"
    const std::string key = target.substr(0, target.find('?'));
    if (target.find("list-type") != std::string::npos) return listing(in_query(target, "prefix="));
    if (target.find("uploads=&") != std::string::npos) return upload_listing();
    if (target.ends_with("?uploads=")) return http_answer(200, upload_made());
    if (target.find("uploadId") != std::string::npos) return answer_of_upload(method, key);
    if (method == "DELETE") return objects_.erase(key), http_answer(204, "");
    if (method == "PUT") return written(key, request);
    return read(method, key);
  }
  void put(const std::string& key, const std::string& bytes) { objects_[key] = {bytes, ""}; }
  void add_upload(const std::string& key) { uploads_.push_back(key); }
  [[nodiscard]] std::string bytes_of(const std::string& key) { return objects_.at(key).bytes; }
  [[nodiscard]] const std::vector<std::string>& aborted() const { return aborted_; }

 private:
  struct Object {
    std::string bytes, attempt;
  };

  static std::string upload_made() {
    return "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>";
  }
  static std::string field(const std::string& request, const std::string& name) {
    const std::size_t at = request.find(name + ": ");
    if (at == std::string::npos) return {};
    const std::size_t from = at + name.size() + 2;
    return request.substr(from, request.find("\r\n", from) - from);
  }
  static std::string in_query(const std::string& target, const std::string& name) {
    std::string value = target.substr(target.find(name) + name.size());
    value = value.substr(0, value.find('&'));
    return percent_decoded(value);
  }
  std::string listing(const std::string& prefix) const {
    std::string text;
    for (const auto& [key, object] : objects_) {
      if (!key.starts_with(prefix)) continue;
      text += "<Contents><Key>" + key + "</Key><Size>" + std::to_string(object.bytes.size()) +
              "</Size><ETag>e</ETag><LastModified>2020-01-01T00:00:00.000Z</LastModified>"
              "</Contents>";
    }
    return http_answer(200, "<ListBucketResult>" + text + "</ListBucketResult>");
  }
  std::string upload_listing() const {
    std::string text;
    for (const std::string& key : uploads_)
      text += "<Upload><Key>" + key + "</Key><UploadId>" + key +
              "</UploadId><Initiated>2020-01-01T00:00:00.000Z</Initiated></Upload>";
    return http_answer(200,
                       "<ListMultipartUploadsResult>" + text + "</ListMultipartUploadsResult>");
  }
  std::string answer_of_upload(const std::string& method, const std::string& key) {
    if (method == "GET") return http_answer(200, "<ListPartsResult></ListPartsResult>");
    aborted_.push_back(key);
    return http_answer(204, "");
  }
  std::string written(const std::string& key, const std::string& request) {
    if (request.find("\r\nIf-") != std::string::npos) return http_answer(412, "");
    Object& object = objects_[key];
    object.attempt = field(request, "x-amz-meta-tessera-attempt");
    const std::string from = field(request, "x-amz-copy-source");
    if (from.empty()) {
      object.bytes = request.substr(request.find("\r\n\r\n") + 4);
      return http_answer(200, "", "ETag: \"e\"\r\n");
    }
    object.bytes = objects_.at(from.substr(3)).bytes;
    return http_answer(200, "<CopyObjectResult><ETag>\"e\"</ETag></CopyObjectResult>");
  }
  std::string read(const std::string& method, const std::string& key) const {
    const auto found = objects_.find(key);
    if (found == objects_.end()) return "HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n";
    const std::string& bytes = found->second.bytes;
    const std::string version =
        "ETag: \"e\"\r\nx-amz-meta-tessera-attempt: " + found->second.attempt + "\r\n";
    if (method == "HEAD")
      return "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(bytes.size()) + "\r\n" +
             version + "\r\n";
    return http_answer(206, bytes,
                       version + "Content-Range: bytes 0-" + std::to_string(bytes.size() - 1) +
                           "/" + std::to_string(bytes.size()) + "\r\n");
  }

  std::mutex mutex_;  // guards what follows while the server runs
  std::map<std::string, Object> objects_;
  std::vector<std::string> uploads_;  // keys
  std::vector<std::string> aborted_;
};

class BucketViews : public ::testing::Test {
 protected:
  BucketViews() {
    ::setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
    ::setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret", 1);
    ::setenv("AWS_ENDPOINT_URL", server_.url("").c_str(), 1);
    store_ = s3_store(parse_bucket_uri("s3://b/p"), std::make_shared<HttpClient>());
  }
  ~BucketViews() override { ::unsetenv("AWS_ENDPOINT_URL"); }

  [[nodiscard]] std::vector<std::shared_ptr<Store>> caches() const {
    return {cached_store(store_, memory_store()),
            block_cached_store(store_, std::make_shared<BlockCache>(directory_.path(), 1 << 20))};
  }

  TemporaryDirectory directory_;
  SmallBucket bucket_;
  LoopbackServer server_{[this](int, const std::string& request) {
    return Scripted{bucket_.answer(request), Then::close};
  }};
  std::shared_ptr<Store> store_;
};

TEST_F(BucketViews, TheServerCopiesAFileThatIsReadThroughACache) {
  const std::string text = text_of(std::string(TESSERA_TEST_DATA) + "/golden/dtypes.safetensors");
  bucket_.put("p/a.safetensors", text);
  std::vector<std::shared_ptr<Store>> sources = caches();
  const auto copies = memory_store();
  put(*copies, "a.safetensors", std::as_bytes(std::span(text)), IfExists::fail);
  sources.push_back(cached_store(store_, copies));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::string target = "c" + std::to_string(i) + ".safetensors";
    const CopyReport report =
        copy({sources[i], "a.safetensors"}, {store_, target}, {.overwrite = true});
    EXPECT_EQ(report.server_bytes, text.size()) << i;
    EXPECT_EQ(bucket_.bytes_of("p/" + target), text);
  }
}

TEST_F(BucketViews, LeftoversHaveTheirAgesInADirectoryAndBehindACache_O26) {
  const std::string left = "p/run/step1/__0_0_0123456789ab.distcp";
  bucket_.put(left, "left");
  std::vector<Location> views{{store_, "run"}, {store_}, {store_, "run/step1"}};
  for (const auto& cached : caches()) views.insert(views.end(), {{cached}, {cached, "run"}});
  for (const Location& view : views) {
    SCOPED_TRACE(to_string(view));
    const GcReport report = gc(view);
    ASSERT_EQ(report.leftovers.size(), 1U);
    EXPECT_EQ(report.leftovers[0].path, "s3://b/" + left);
    ASSERT_TRUE(report.leftovers[0].age);
    EXPECT_GT(*report.leftovers[0].age, std::chrono::hours(24 * 365));
  }
}

TEST_F(BucketViews, UploadsOfADirectoryAreFoundThereAndBehindACache_O26) {
  const std::string left = "p/run/step1/__0_0_0123456789ab.distcp";
  bucket_.add_upload(left);
  bucket_.add_upload("p/rung/__0_0_0123456789ab.distcp");
  std::vector<Location> views{{store_, "run"}};
  for (const auto& cached : caches()) views.emplace_back(cached, "run");
  for (const Location& view : views) {
    const GcReport report = gc_uploads(view, {.remove = true});
    ASSERT_EQ(report.leftovers.size(), 1U);
    EXPECT_EQ(report.leftovers[0].path, "s3://b/" + left);
    EXPECT_TRUE(report.leftovers[0].removed);
  }
  EXPECT_EQ(bucket_.aborted(), std::vector<std::string>(views.size(), left));
  EXPECT_EQ(gc_uploads(store_).leftovers.size(), 2U);
}

}  // namespace
}  // namespace tessera
