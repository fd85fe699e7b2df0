#include "storage/s3/sigv4.h"

#include <algorithm>
#include <cctype>
#include <ctime>
#include <map>
#include <span>
#include <vector>

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "base/process.h"
#include "base/text.h"
#include "storage/http/shared_library.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

struct Crypto {
  decltype(&::EVP_sha256) sha256 = nullptr;
  decltype(&::EVP_Digest) digest = nullptr;
  decltype(&::HMAC) hmac = nullptr;
};

PerProcess<Crypto>& functions = *new PerProcess<Crypto>;  // threads may outlive main()

const Crypto& crypto() {
  return functions.get([] {
    const SharedLibrary library("libcrypto.so.3");
    auto found = std::make_unique<Crypto>();
    library.find("EVP_sha256", found->sha256);
    library.find("EVP_Digest", found->digest);
    library.find("HMAC", found->hmac);
    return found;
  });
}

}  // namespace

Sha256 sha256(ByteView bytes) {
  Sha256 digest{};
  auto* const out = reinterpret_cast<unsigned char*>(digest.data());
  if (crypto().digest(bytes.data(), bytes.size(), out, nullptr, crypto().sha256(), nullptr) != 1)
    throw Error(ErrorCode::io, "libcrypto gives no SHA-256");
  return digest;
}

Sha256 hmac_sha256(ByteView key, std::string_view text) {
  Sha256 digest{};
  unsigned int size = digest.size();
  const auto* const from = reinterpret_cast<const unsigned char*>(text.data());
  if (crypto().hmac(crypto().sha256(), key.data(), static_cast<int>(key.size()), from, text.size(),
                    reinterpret_cast<unsigned char*>(digest.data()), &size) == nullptr)
    throw Error(ErrorCode::io, "libcrypto gives no HMAC");
  return digest;
}

std::string hex(const Sha256& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : digest) {
    text += kDigits[std::to_integer<unsigned>(byte >> 4U)];
    text += kDigits[std::to_integer<unsigned>(byte & std::byte{0xF})];
  }
  return text;
}

// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html has the rules.

namespace {

struct Words {
  const char* algorithm;
  const char* key;  // before the secret
  const char* end;  // of the scope
};
constexpr Words kAws{"AWS4-HMAC-SHA256", "AWS4", "aws4_request"};
constexpr Words kGoogle{"GOOG4-HMAC-SHA256", "GOOG4", "goog4_request"};

const Words& words_of(Dialect dialect) {
  return dialect == Dialect::google ? kGoogle : kAws;
}

ByteView bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// 20130524T000000Z
std::string timestamp_of(std::chrono::system_clock::time_point now) {
  const std::time_t since_1970 = std::chrono::system_clock::to_time_t(now);
  std::tm utc{};
  ::gmtime_r(&since_1970, &utc);
  char text[17];
  (void)std::strftime(text, sizeof text, "%Y%m%dT%H%M%SZ", &utc);
  return text;
}

// Sorted by name, then by value; a name without '=' has an empty value.
std::string canonical_query(std::string_view query) {
  std::vector<std::pair<std::string, std::string>> pairs;
  while (!query.empty()) {
    const std::string_view one = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(one.size() + 1, query.size()));
    if (one.empty()) continue;
    const std::size_t equals = one.find('=');
    pairs.emplace_back(one.substr(0, equals), equals == std::string_view::npos
                                                  ? std::string_view()
                                                  : one.substr(equals + 1));
  }
  std::ranges::sort(pairs);
  std::string text;
  for (const auto& [name, value] : pairs) {
    if (!text.empty()) text += '&';
    text.append(name).append("=").append(value);
  }
  return text;
}

// Blanks at the ends go, several inside become one.
std::string collapsed(std::string_view value) {
  std::string text;
  for (const char c : value) {
    const bool is_blank = c == ' ' || c == '\t';
    if (!is_blank) {
      text += c;
    } else if (!text.empty() && text.back() != ' ') {
      text += ' ';
    }
  }
  if (text.ends_with(' ')) text.pop_back();
  return text;
}

struct CanonicalHeaders {
  std::string lines, names;
};

CanonicalHeaders canonical_headers(const HttpRequest& request) {
  std::map<std::string, std::string> sorted;
  for (const auto& [name, value] : request.headers) {
    const auto [joined, is_first] = sorted.try_emplace(lowered(name));
    joined->second += (is_first ? "" : ",") + collapsed(value);
  }
  CanonicalHeaders canonical;
  for (const auto& [name, value] : sorted) {
    canonical.lines.append(name).append(":").append(value).append("\n");
    if (!canonical.names.empty()) canonical.names += ';';
    canonical.names += name;
  }
  return canonical;
}

std::string signature_of(const Credentials& credentials, const SigningScope& scope,
                         const std::string& date, const std::string& to_sign) {
  const Words& words = words_of(scope.dialect);
  const std::string secret = words.key + credentials.secret;
  Sha256 key = hmac_sha256(bytes_of(secret), date);
  for (const std::string_view part : {std::string_view(scope.region),
                                      std::string_view(scope.service), std::string_view(words.end)})
    key = hmac_sha256(key, part);
  return hex(hmac_sha256(key, to_sign));
}

}  // namespace

std::string vendor_header(Dialect dialect, std::string_view name) {
  return (dialect == Dialect::google ? "x-goog-" : "x-amz-") + std::string(name);
}

std::string sha256_hex(ByteView bytes) {
  return hex(sha256(bytes));
}

void sign(HttpRequest& request, const Credentials& credentials, const SigningScope& scope,
          std::string_view payload_hash) {
  const Uri url = parse_uri(request.url);
  const Words& words = words_of(scope.dialect);
  const std::string time = timestamp_of(scope.now), date = time.substr(0, 8);
  request.headers.emplace_back("host", authority_of(url));
  const auto header = [&](const char* name) { return vendor_header(scope.dialect, name); };
  request.headers.emplace_back(header("date"), time);
  // Other services take the hash as signed without being told it.
  if (is_one_of(scope.service, "s3", "storage"))
    request.headers.emplace_back(header("content-sha256"), payload_hash);
  if (!credentials.token.empty())
    request.headers.emplace_back(header("security-token"), credentials.token);
  const CanonicalHeaders headers = canonical_headers(request);
  const std::string canonical = request.method + "\n" + (url.path.empty() ? "/" : url.path) + "\n" +
                                canonical_query(url.query) + "\n" + headers.lines + "\n" +
                                headers.names + "\n" + std::string(payload_hash);
  const std::string place = date + "/" + scope.region + "/" + scope.service + "/" + words.end;
  const std::string to_sign = std::string(words.algorithm) + "\n" + time + "\n" + place + "\n" +
                              sha256_hex(bytes_of(canonical));
  request.headers.emplace_back(
      "authorization", std::string(words.algorithm) + " Credential=" + credentials.key_id + "/" +
                           place + ",SignedHeaders=" + headers.names +
                           ",Signature=" + signature_of(credentials, scope, date, to_sign));
}

}  // namespace tessera::s3
