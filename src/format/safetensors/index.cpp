#include "format/safetensors/index.h"

#include <set>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "format/safetensors/json.h"
#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

constexpr std::size_t kMaxDepth = 64;

// Empty when `name` is the plain name of a file, else what is wrong with it.
std::string fault_of(std::string_view name) {
  if (name.empty()) return "is empty";
  if (is_one_of(name, ".", "..")) return "is a folder";
  if (name.find('\0') != std::string_view::npos) return "holds a zero byte";
  if (name.find_first_of("/\\") != std::string_view::npos) return "holds a folder";
  if (name.size() > 1 && name[1] == ':') return "holds a drive";
  return "";
}

// Receives the JSON. A member that returns false stops the parser; `error` says why.
class IndexHandler : public NumbersAsText {
 public:
  explicit IndexHandler(Index& index) : index_(index) {}

  bool Null() { return scalar("null"); }
  bool Bool(bool) { return scalar("a boolean"); }
  bool RawNumber(const char* text, rapidjson::SizeType size, bool) {
    if (in_total_size()) index_.total_size = count_of({text, size});
    return scalar("a number");
  }
  bool String(const char* text, rapidjson::SizeType size, bool) {
    if (!in_map()) return scalar("a string");
    const std::string file(text, size);
    if (const std::string fault = fault_of(file); !fault.empty()) {
      return fail(ErrorCode::unsafe, "the file name '" + file + "' " + fault);
    }
    index_.files.emplace(path_.back(), file);
    return true;
  }
  bool StartObject() {
    if (in_map()) return fail(ErrorCode::corrupt, "an object where a file name is due");
    if (is_map()) has_map_ = true;
    return enter();
  }
  bool Key(const char* text, rapidjson::SizeType size, bool) {
    std::string key(text, size);
    path_.back() = key;
    if (!seen_.back().insert(std::move(key)).second)
      return fail(ErrorCode::corrupt, "the name appears twice");
    return true;
  }
  bool EndObject(rapidjson::SizeType) { return leave(); }
  bool StartArray() {
    if (has_own_place()) return fail(ErrorCode::corrupt, "a list");
    return enter();
  }
  bool EndArray(rapidjson::SizeType) { return leave(); }

  [[nodiscard]] bool has_map() const { return has_map_; }
  [[nodiscard]] std::string key() const { return in_map() ? path_.back() : std::string(); }

  ErrorCode code = ErrorCode::corrupt;
  std::string error;  // empty: the JSON itself is at fault

 private:
  // At a value of weight_map; at weight_map itself.
  [[nodiscard]] bool in_map() const { return path_.size() == 2 && path_[0] == "weight_map"; }
  [[nodiscard]] bool is_map() const { return path_.size() == 1 && path_[0] == "weight_map"; }
  [[nodiscard]] bool in_total_size() const {
    return path_.size() == 2 && path_[0] == "metadata" && path_[1] == "total_size";
  }
  // Whether the format says what the value at this place is.
  [[nodiscard]] bool has_own_place() const { return path_.empty() || in_map() || is_map(); }

  bool scalar(const char* what) {
    if (has_own_place()) {
      return fail(ErrorCode::corrupt, std::string(what) + " where the index has something else");
    }
    return true;
  }
  bool enter() {
    if (path_.size() == kMaxDepth) return fail(ErrorCode::limit, "JSON nested deeper than 64");
    path_.emplace_back();
    seen_.emplace_back();
    return true;
  }
  bool leave() {
    path_.pop_back();
    seen_.pop_back();
    return true;
  }
  bool fail(ErrorCode with, std::string what) {
    code = with;
    error = std::move(what);
    return false;
  }

  Index& index_;
  std::vector<std::string> path_;  // the key at each level; empty in lists
  std::vector<std::set<std::string>> seen_;
  bool has_map_ = false;
};

}  // namespace

Index read_index(ByteView text) {
  Index index;
  IndexHandler handler(index);
  const auto fail = [&](ErrorCode code, const std::string& what, std::size_t at) {
    Error error(code, "safetensors index: " + what);
    if (!handler.key().empty()) error.at_key(handler.key());
    throw error.at_offset(at);
  };
  const JsonEnd end = parse_json(text, handler);
  if (!end.problem.empty()) fail(handler.code, end.problem, end.at);
  if (end.at < text.size()) fail(ErrorCode::corrupt, "text after the JSON", end.at);
  if (!handler.has_map()) fail(ErrorCode::corrupt, "there is no weight_map", text.size());
  return index;
}

std::string encode_index(const Index& index) {
  std::string text = "{\n  \"metadata\": {";
  if (index.total_size)
    text += "\n    \"total_size\": " + std::to_string(*index.total_size) + "\n  ";
  text += "},\n  \"weight_map\": {";
  bool first = true;
  for (const auto& [name, file] : index.files) {
    text += first ? "\n    " : ",\n    ";
    append_json(text, name, JsonText::ascii);
    text += ": ";
    append_json(text, file, JsonText::ascii);
    first = false;
  }
  if (!first) text += "\n  ";
  text += "}\n}\n";
  return text;
}

}  // namespace tessera::safetensors
