// Signs requests as sigv4_test.py tells them, a line of JSON each, and prints their headers.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "storage/s3/sigv4.h"

int main() {
  using Json = nlohmann::json;
  for (std::string line; std::getline(std::cin, line);) {
    const Json told = Json::parse(line);
    tessera::HttpRequest request{.method = told["method"], .url = told["url"]};
    for (const Json& header : told["headers"]) request.headers.emplace_back(header[0], header[1]);
    const tessera::s3::Credentials credentials{told["key_id"], told["secret"], told["token"]};
    const tessera::s3::SigningScope scope{
        told["region"], told["service"],
        std::chrono::system_clock::from_time_t(told["time"].get<std::time_t>())};
    tessera::s3::sign(request, credentials, scope, told["hash"].get<std::string>());
    std::cout << Json(request.headers).dump() << "\n";
  }
}
