// One attempt at a request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "storage/http/client.h"
#include "tessera/error.h"

namespace tessera {

struct Attempt {
  HttpResponse response;           // status 0: the head of an answer did not come
  std::string failure;             // what went wrong; empty: the answer is whole
  ErrorCode code = ErrorCode::io;  // of the failure; `corrupt`: the body does not fill `into`
  bool is_connected = false;       // somebody listened
  bool is_final = false;           // another attempt would fail likewise
  bool is_stale = false;  // a connection that had been kept was closed: another one will do at once
  std::uint64_t sent = 0, received = 0;  // bytes of bodies
};

// A handle of libcurl. It keeps its connection for the next request. One thread at a time.
class Transfer {
 public:
  Transfer();  // throws `unsupported` where there is no libcurl
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Ends after `whole` at the latest. Throws what HttpClient::send() throws at once.
  Attempt attempt(const HttpRequest& request, const HttpOptions& options,
                  std::chrono::milliseconds whole);

 private:
  class Handle;
  std::unique_ptr<Handle> handle_;
};

}  // namespace tessera
