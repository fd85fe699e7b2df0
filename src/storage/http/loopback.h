// Which hosts are this machine.
#pragma once

#include <string>

namespace tessera {

// 127.x.x.x, ::1 and localhost.
[[nodiscard]] bool is_loopback(const std::string& host);
[[nodiscard]] bool is_loopback_url(const std::string& url);

}  // namespace tessera
