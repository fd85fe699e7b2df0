#include "checkpoint/read/json_writer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace tessera {

// JSON that is written as text is what the JSON library writes (fault-rows F16).

namespace {

using Json = nlohmann::ordered_json;

TEST(JsonText, LinesAreThoseOfTheLibrary) {
  for (const char* text :
       {R"({})", R"([])", R"(7)", R"("a{b:[c,]d}")", R"({"a":{},"b":[],"c":[[],{}]})",
        R"({"version":1,"leaves":[{"path":["a",0],"value":{"x":[1.5,null,true]}},{}],"e":-3})",
        R"({"quote\"d":"back\\","\\\"":["\\"],"\u00e4":"\u2028,\"{"})"}) {
    const Json json = Json::parse(text);
    EXPECT_EQ(json_in_lines(json.dump(-1, ' ', true)), json.dump(1, ' ', true)) << text;
  }
}

TEST(JsonText, QuotedTextIsThatOfTheLibrary) {
  for (const std::string text : {"", "plain", "\"\\\n\t\x01", "\xc3\xa4\xe2\x82\xac", "\xff\xc3"}) {
    for (const BeyondAscii beyond : {BeyondAscii::as_it_is, BeyondAscii::escaped}) {
      JsonWriter json(BadText::replace, beyond);
      json.text(text);
      EXPECT_EQ(json.json(), Json(text).dump(1, ' ', beyond == BeyondAscii::escaped,
                                             Json::error_handler_t::replace));
    }
  }
}

}  // namespace
}  // namespace tessera
