// JSON as text, for what a save writes: no value of the JSON library is built. The library takes
// its values apart with memory that it allocates in their destructors: where none is left, it ends
// the process (fault-rows F16).
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class BadText : std::uint8_t { refuse, replace };
enum class BeyondAscii : std::uint8_t { escaped, as_it_is };

// Writes without white space, as the library's dump(), in the order of the calls; commas come by
// themselves.
class JsonWriter {
 public:
  // What becomes of text that is not UTF-8, where `refuse` throws `unsupported`, and of characters
  // beyond ASCII.
  explicit JsonWriter(BadText bad_text = BadText::refuse,
                      BeyondAscii beyond_ascii = BeyondAscii::escaped)
      : bad_text_(bad_text), beyond_ascii_(beyond_ascii) {}

  // An object or an array: '{' or '[', and '}' or ']'.
  void begin(char bracket);
  void end(char bracket) { json_ += bracket; }
  // A member of an object. Its value comes next.
  void key(std::string_view plain);  // without characters that have to be escaped
  void name(const std::string& text);

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
  BeyondAscii beyond_ascii_;
  std::string json_;
};

// JSON without white space, with a line for each entry, as the library's dump(1) has it.
[[nodiscard]] std::string json_in_lines(std::string_view json);

// What the JSON library threw about a text, in our words: "no JSON from byte 7 on", "the entry 'x'
// is missing", "a value of another type than belongs there".
[[nodiscard]] std::string json_fault(const std::exception& thrown);

}  // namespace tessera
