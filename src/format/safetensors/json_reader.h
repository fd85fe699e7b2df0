// For handlers of rapidjson's kParseNumbersAsStringsFlag: numbers arrive in RawNumber only.
#pragma once

#include <cstdint>

namespace tessera::safetensors {

struct NumbersAsText {
  static bool Int(int) { return false; }
  static bool Uint(unsigned) { return false; }
  static bool Int64(std::int64_t) { return false; }
  static bool Uint64(std::uint64_t) { return false; }
  static bool Double(double) { return false; }
};

}  // namespace tessera::safetensors
