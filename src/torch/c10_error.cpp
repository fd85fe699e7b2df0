#include "torch/c10_error.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "comm/whereabouts.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Gloo, TCPStore and NCCL have no common type for a passed deadline; all of them say one of these.
bool says_timeout(const std::string& text) {
  for (const char* word : {"imed out", "imeout", "TIMEDOUT"}) {
    if (text.find(word) != std::string::npos) return true;
  }
  return false;
}

// Whether this rank's own system refused, before any peer was asked.
bool says_refused(const std::string& text) {
  return text.find("EADDRINUSE") != std::string::npos || text.find("EACCES") != std::string::npos;
}

// The first line; the rest is a stack of C++ frames.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

[[noreturn]] void throw_as_error(const std::string& text, std::string_view operation) {
  const auto code = says_refused(text)   ? ErrorCode::io
                    : says_timeout(text) ? ErrorCode::timeout
                                         : ErrorCode::peer_failed;
  auto doing = std::string(operation);
  if (const auto where = whereabouts(); !where.empty()) doing += ", " + where;
  throw Error(code, first_line(text)).while_doing(std::move(doing));
}

}  // namespace

void throw_communication_error(std::string_view operation) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& e) {
    throw_as_error(e.what_without_backtrace(), operation);
  } catch (const std::exception& e) {
    throw_as_error(e.what(), operation);
  }
}

}  // namespace tessera
