#include "base/digest.h"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <new>

#include <fmt/format.h>

// With the widest registers that the processor has, instead of those that every one has.
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "tessera/error.h"

namespace tessera {

namespace {

XXH3_state_t* raw(void* state) {
  return static_cast<XXH3_state_t*>(state);
}

}  // namespace

std::uint64_t digest64(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

RunningDigest::RunningDigest() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(raw(state_.get()));
}

void RunningDigest::Free::operator()(void* state) const {
  XXH3_freeState(raw(state));
}

void RunningDigest::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(raw(state_.get()), bytes.data(), bytes.size());
}

std::uint64_t RunningDigest::value() const {
  return XXH3_64bits_digest(raw(state_.get()));
}

std::string digest_text(std::uint64_t digest) {
  return fmt::format("{:016x}", digest);
}

std::uint64_t digest_of_text(std::string_view digits) {
  std::uint64_t digest = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), digest, 16);
  const bool lower = digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  if (digits.size() != kDigestDigits || !lower || error != std::errc() ||
      end != digits.data() + digits.size()) {
    throw Error(ErrorCode::corrupt, "a digest is not 16 lower-case hex digits");
  }
  return digest;
}

}  // namespace tessera
