// The texts in which pickle writes strings and numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::pickle {

// UTF-8 as Python decodes it with "surrogatepass"; throws `corrupt` for anything else.
void require_utf8(std::string_view text);

// The bytes that a string of code points below 256 stands for; throws `corrupt` for other strings.
[[nodiscard]] std::vector<std::byte> latin1_to_bytes(std::string_view utf8);
[[nodiscard]] std::string bytes_to_latin1(ByteView bytes);  // as UTF-8

// Arguments of the text opcodes of protocol 0. Each throws `corrupt` for what Python refuses.
[[nodiscard]] std::string unquote(std::string_view literal);  // 'it\'s' as repr writes it
[[nodiscard]] std::string decode_raw_unicode(std::string_view escaped);  // \uXXXX in Latin-1
[[nodiscard]] double parse_real(std::string_view text);
[[nodiscard]] Value parse_integer(std::string_view text);        // "00" and "01" are bools
[[nodiscard]] std::uint64_t parse_index(std::string_view text);  // of the memo: as int() takes it

}  // namespace tessera::pickle
