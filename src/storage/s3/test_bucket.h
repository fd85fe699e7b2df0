// The bucket of the server that tests/stores/with_server.py runs beside the tests.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "base/process.h"
#include "storage/http/uri.h"
#include "storage/s3/s3_store.h"

namespace tessera {

// A place where nobody else writes.
inline Uri fresh_url() {
  return parse_bucket_uri("s3://tessera/" + random_attempt() + "/deep");
}

inline std::shared_ptr<HttpClient> test_client() {
  static const auto client = std::make_shared<HttpClient>();
  return client;
}

inline std::string server_name() {
  const char* server = std::getenv("TESSERA_S3_SERVER");
  return server == nullptr ? std::string() : server;
}
inline bool is_moto() {
  return server_name() == "moto";
}
// Whether its shortcomings are known: another one has to do all that is promised.
inline bool is_known_server() {
  return is_moto() || server_name() == "seaweedfs";
}

}  // namespace tessera
