// The body of a request as libcurl asks for it: straight from the caller's memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "storage/http/client.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {

class Upload {
 public:
  explicit Upload(const std::vector<ByteView>& pieces) : pieces_(pieces) {
    for (const ByteView piece : pieces) size_ += piece.size();
  }

  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] std::uint64_t sent() const { return sent_; }
  // Copies the next bytes to `out`, as many as there are and fit. Returns how many.
  std::size_t read(MutableByteView out) {
    std::size_t done = 0;
    while (done < out.size() && piece_ < pieces_.size()) {
      const ByteView rest = pieces_[piece_].subspan(offset_);
      const std::size_t count = std::min(rest.size(), out.size() - done);
      if (count != 0) std::memcpy(out.data() + done, rest.data(), count);
      done += count;
      offset_ += count;
      if (count == rest.size()) {
        ++piece_;
        offset_ = 0;
      }
    }
    sent_ += done;
    return done;
  }

 private:
  const std::vector<ByteView>& pieces_;
  std::uint64_t size_ = 0;
  std::uint64_t sent_ = 0;
  std::size_t piece_ = 0;   // the next byte is in this piece
  std::size_t offset_ = 0;  // there
};

// One attempt at a request.

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
