// JSON as text, without white space, as the JSON library's dump() writes it (fault-rows F16: no
// value of the library is built, see digests/json_text.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class BadText : std::uint8_t { refuse, replace };

// Writes in the order of the calls; commas come by themselves. Characters beyond ASCII are escaped.
class JsonWriter {
 public:
  // What becomes of text that is not UTF-8. `refuse` throws `unsupported`.
  explicit JsonWriter(BadText bad_text = BadText::refuse) : bad_text_(bad_text) {}

  // Of an object or an array: '{' or '[', and '}' or ']'.
  void begin(char bracket);
  void end(char bracket) { json_ += bracket; }
  // Of a member of an object. Its value comes next.
  void key(std::string_view plain);  // without characters that have to be escaped

  void text(const std::string& text);
  void integer(std::int64_t number);
  void real(double finite);
  // JSON that is there already: a word, or what another writer has made.
  void raw(std::string_view json);

  [[nodiscard]] const std::string& json() const { return json_; }
  [[nodiscard]] std::string take() { return std::move(json_); }

 private:
  void separate();

  BadText bad_text_;
  std::string json_;
};

}  // namespace tessera
