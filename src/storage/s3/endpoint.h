// Requests to the server of one bucket: each attempt is signed anew, and what an answer asks for is
// done before the next one: another token, clock or region.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/process.h"
#include "storage/http/client.h"
#include "storage/s3/credentials.h"
#include "storage/s3/settings.h"
#include "storage/s3/sigv4.h"
#include "storage/s3/xml.h"

namespace tessera::s3 {

using Fields = std::vector<std::pair<std::string, std::string>>;

// The header with the checksum of a body that is sent. Servers that compare it with what came say
// so by the same header.
inline constexpr const char* kChecksum = "x-amz-checksum-crc32";
// What begins so in a Call is Google's own there: it refuses a request with both kinds.
inline constexpr std::string_view kVendor = "x-amz-";

// A request of S3, before it has a URL and a signature.
struct Call {
  std::string method;
  std::string key = {};  // empty: the bucket itself
  Fields query = {};     // not encoded
  Fields headers = {};
  ByteView body = {};                   // lives until the answer is there
  Scattered into = {};                  // as HttpRequest::into
  const char* permission = "";          // what credentials need for it: "s3:PutObject"
  std::optional<Document> brings = {};  // none: a good answer has no body, or is an object
  // The server works before it answers, for minutes maybe: it copies, or puts parts together.
  bool is_work = false;
};

struct Answer {
  HttpResponse response;
  ServerError error;  // code empty: none, or the answer has no body
  // Whether the status is good, but the answer not what a server of S3 says to this call: a page of
  // a proxy, or cut. What became of the call is not known then.
  bool is_strange = false;
  [[nodiscard]] bool is_good() const {
    return response.status >= 200 && response.status < 300 && error.code.empty() && !is_strange;
  }
};

// Threads may send at once.
class Endpoint {
 public:
  // `name`: "s3://bucket", for errors.
  Endpoint(std::string name, Settings settings, std::shared_ptr<HttpClient> client);

  // Returns any answer that another attempt would not change; throws what HttpClient does. A 200
  // whose body is an error has that in `error`. A strange answer is asked for again, twice. Of a
  // HEAD that is refused it returns what a GET is told.
  Answer send(const Call& call);
  // Throws the Error that tells of an answer which is not good (`corrupt` of a strange one); good
  // ones it returns.
  Answer require_good(const Call& call, Answer answer) const;
  // What an Error tells of it.
  [[nodiscard]] std::string describe_answer(const Call& call, const Answer& answer) const {
    return describe(made(call, region()), answer.response);
  }
  Answer send_good(const Call& call) { return require_good(call, send(call)); }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const Settings& settings() const { return settings_; }
  // A header of an answer, by the name that it has in a Call.
  [[nodiscard]] std::string told(const HttpResponse& response, std::string_view name) const;
  // How long one request is tried for.
  [[nodiscard]] std::chrono::milliseconds patience() const { return client_->operation_within(); }
  // How an Error names an object.
  [[nodiscard]] std::string path_of(const std::string& key) const { return name_ + "/" + key; }

 private:
  struct Repairs;
  [[nodiscard]] Answer send_by_itself(const Call& call);
  [[nodiscard]] Dialect dialect() const;
  [[nodiscard]] Fields headers_of(const Call& call) const;
  [[nodiscard]] HttpRequest made(const Call& call, const std::string& region) const;
  [[nodiscard]] HttpRequest signed_request(const Call& call, const std::string& region);
  [[nodiscard]] bool is_again(const Call& call, const HttpResponse& response, Repairs& repairs);
  [[nodiscard]] bool has_new_clock(const HttpResponse& response);
  [[nodiscard]] bool has_new_region(const HttpResponse& response, const ServerError& error,
                                    const std::string& asked_in);
  [[nodiscard]] std::string region() const;

  const std::string name_;
  const Settings settings_;  // but for the region, which a server may correct
  const std::shared_ptr<HttpClient> client_;
  CredentialSource credentials_;
  std::atomic<std::chrono::seconds::rep> clock_offset_{0};  // server's clock less ours
  mutable ShortMutex mutex_;
  std::string region_;  // guarded by mutex_
};

}  // namespace tessera::s3
