#include "storage/http/loopback.h"

#include <arpa/inet.h>

#include "base/one_of.h"
#include "storage/http/uri.h"

namespace tessera {

bool is_loopback(const std::string& host) {
  in_addr address{};
  if (::inet_pton(AF_INET, host.c_str(), &address) == 1) return ntohl(address.s_addr) >> 24U == 127;
  return is_one_of<std::string_view>(host, "localhost", "[::1]");
}

bool is_loopback_url(const std::string& url) {
  return is_loopback(parse_uri(url).host);
}

}  // namespace tessera
