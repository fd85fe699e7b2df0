// An answer while it arrives. What a server may send is bounded here.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "storage/http/client.h"

namespace tessera {

class Reply {
 public:
  explicit Reply(const HttpRequest& request) : request_(request) {}

  // False: nothing more is wanted.
  [[nodiscard]] bool take_header(std::string_view line) noexcept;
  [[nodiscard]] bool take_body(ByteView bytes) noexcept;

  // Throws what is to be told at once, whatever became of the connection.
  void require_acceptable() const {
    if (refusal_) std::rethrow_exception(refusal_);
  }
  // Why a whole answer does not fill HttpRequest::into; empty: it does, or it does not go there.
  [[nodiscard]] std::string misfit() const;
  [[nodiscard]] std::uint64_t received() const { return received_; }
  [[nodiscard]] HttpResponse& response() { return response_; }

 private:
  [[nodiscard]] bool goes_into() const;
  void begin(std::string_view status_line);
  void add_header(std::string_view line);
  [[nodiscard]] bool end_head();
  [[nodiscard]] bool keep(ByteView bytes);
  [[nodiscard]] std::string path() const;

  const HttpRequest& request_;
  HttpResponse response_;
  std::size_t head_bytes_ = 0, head_lines_ = 0;
  std::uint64_t received_ = 0;  // of the body
  std::uint64_t promised_ = 0;  // of a body that was stopped for its length; 0: it was not
  bool is_head_over_ = false;   // what comes now is no header of ours
  std::exception_ptr refusal_;
};

}  // namespace tessera
