#include "checkpoint/tree/json_writer.h"

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera {

using Json = nlohmann::json;

// Text ends with a quotation mark, so that these characters are always JSON's own.
void JsonWriter::separate() {
  constexpr std::string_view kBefore = "{[:";
  if (!json_.empty() && kBefore.find(json_.back()) == std::string_view::npos) json_ += ',';
}

void JsonWriter::begin(char bracket) {
  separate();
  json_ += bracket;
}

void JsonWriter::key(std::string_view plain) {
  separate();
  json_.append("\"").append(plain).append("\":");
}

// Values of the library that are no containers need no memory to be destroyed.
void JsonWriter::text(const std::string& text) {
  const bool is_refused = bad_text_ == BadText::refuse;
  const auto handler = is_refused ? Json::error_handler_t::strict : Json::error_handler_t::replace;
  try {
    raw(Json(text).dump(-1, ' ', true, handler));
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::unsupported,
                std::string("a name or text is not UTF-8: ") + error.what());
  }
}

void JsonWriter::integer(std::int64_t number) {
  raw(std::to_string(number));
}

void JsonWriter::real(double finite) {
  raw(Json(finite).dump());
}

void JsonWriter::raw(std::string_view json) {
  separate();
  json_ += json;
}

}  // namespace tessera
