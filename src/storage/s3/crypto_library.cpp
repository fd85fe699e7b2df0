#include "storage/s3/crypto_library.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "base/fork.h"
#include "storage/http/shared_library.h"
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

}  // namespace tessera::s3
