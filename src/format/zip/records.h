// Numbers of the zip format that the reader and the writer share.
#pragma once

#include <cstdint>

namespace tessera::zip {

inline constexpr std::uint32_t kLocalHeader = 0x04034b50;    // "PK\3\4"
inline constexpr std::uint32_t kDescriptor = 0x08074b50;     // "PK\7\8"
inline constexpr std::uint32_t kCentralHeader = 0x02014b50;  // "PK\1\2"
inline constexpr std::uint32_t kEnd64 = 0x06064b50;          // "PK\6\6"
inline constexpr std::uint32_t kEnd64Locator = 0x07064b50;   // "PK\6\7"
inline constexpr std::uint32_t kEnd = 0x06054b50;            // "PK\5\6"

inline constexpr std::uint64_t kLocalHeaderSize = 30;    // without name and extra fields
inline constexpr std::uint64_t kCentralHeaderSize = 46;  // without name, extra fields and comment
inline constexpr std::uint64_t kEnd64Size = 56;
inline constexpr std::uint64_t kEnd64LocatorSize = 20;
inline constexpr std::uint64_t kEndSize = 22;
inline constexpr std::uint64_t kDescriptorSize = 16;    // with 32-bit sizes
inline constexpr std::uint64_t kDescriptor64Size = 24;  // with 64-bit sizes

inline constexpr std::uint16_t kZip64Field = 1;  // id of the extra field with 64-bit numbers
inline constexpr std::uint32_t kIn64 =
    0xFFFFFFFF;  // "see the 64-bit field"; values from here on go there

inline constexpr std::uint16_t kFlagDescriptor = 1U << 3;
inline constexpr std::uint16_t kFlagUtf8 = 1U << 11;

}  // namespace tessera::zip
