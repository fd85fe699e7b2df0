// yaml-cpp finds the structure, event by event; what the events become is decided here.
#include <algorithm>
#include <array>
#include <istream>
#include <map>
#include <optional>
#include <streambuf>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include "base/one_of.h"
#include "format/olmo/config.h"
#include "format/olmo/yaml_scalar.h"
#include "format/pickle/text.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::olmo {
namespace {

using Kind = Value::Kind;

constexpr std::size_t kDeepest = 100;
constexpr std::size_t kMultiplied = 10;  // how far aliases may multiply a document
constexpr std::string_view kCore = "tag:yaml.org,2002:";

// What a tag of YAML's own asks of a plain scalar.
struct Type {
  std::string_view name;
  Kind kind;
};
constexpr std::array<Type, 4> kTypes{
    {{"int", Kind::integer}, {"float", Kind::real}, {"bool", Kind::boolean}, {"null", Kind::none}}};

[[noreturn]] void refuse(ErrorCode code, const std::string& what, const YAML::Mark& mark) {
  Error error(code, what);
  if (mark.pos >= 0) error.at_offset(static_cast<std::uint64_t>(mark.pos));
  throw error;
}

[[noreturn]] void refuse_tag(const std::string& tag, const YAML::Mark& mark) {
  if (tag.starts_with(std::string(kCore) + "python/") || tag.starts_with("!python/")) {
    refuse(ErrorCode::unsafe, "the YAML tag " + printable(tag, 100) + " names a Python object",
           mark);
  }
  refuse(ErrorCode::unsupported, "the YAML tag " + printable(tag, 100) + " is not known", mark);
}

// Reading memory as a stream, which is what the parser takes.
class MemoryBuffer final : public std::streambuf {
 public:
  explicit MemoryBuffer(ByteView bytes) {
    // A get area is not written to.
    auto* begin = reinterpret_cast<char*>(const_cast<std::byte*>(bytes.data()));
    setg(begin, begin, begin + bytes.size());
  }
};

class Builder final : public YAML::EventHandler {
 public:
  explicit Builder(std::size_t size) : most_nodes_(size * kMultiplied) {}

  [[nodiscard]] const Value& root() const { return root_; }

  void OnDocumentStart(const YAML::Mark& mark) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add({}, 1, anchor, mark); }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    add(scalar(tag, value, mark), 1, anchor, mark);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) {
      refuse(ErrorCode::corrupt, "a YAML alias of nothing, or of what it stands in", mark);
    }
    const Anchored known = found->second;
    add(known.value, known.nodes, YAML::NullAnchor, mark);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value style) override {
    require_tag(tag, "seq", mark);
    push(Value::list(), anchor, mark);
  }
  void OnSequenceEnd() override { pop(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value style) override {
    require_tag(tag, "map", mark);
    push(Value::dict(), anchor, mark);
  }
  void OnMapEnd() override { pop(); }

 private:
  struct Anchored {
    Value value;
    std::size_t nodes = 0;  // in the subtree, aliases counted in full
  };
  struct Frame {
    Value value;
    YAML::anchor_t anchor = YAML::NullAnchor;
    YAML::Mark mark;
    std::size_t nodes = 1;
    std::optional<Value> key;  // of a dict, while its value is awaited
  };

  static void require_tag(const std::string& tag, std::string_view own, const YAML::Mark& mark) {
    if (!is_one_of(tag, "", "?", "!", std::string(kCore) + std::string(own))) refuse_tag(tag, mark);
  }

  static Value scalar(const std::string& tag, const std::string& text, const YAML::Mark& mark) {
    if (tag == "?") return plain_scalar(text);
    if (is_one_of(tag, "", "!", std::string(kCore) + "str")) return text;
    return typed_scalar(tag, text, mark);
  }

  // A scalar of one of YAML's own types.
  static Value typed_scalar(const std::string& tag, const std::string& text,
                            const YAML::Mark& mark) {
    if (!tag.starts_with(kCore)) refuse_tag(tag, mark);
    const std::string_view type = std::string_view(tag).substr(kCore.size());
    const Value value = plain_scalar(text);
    const auto* wanted = std::ranges::find(kTypes, type, &Type::name);
    if (wanted == kTypes.end()) refuse_tag(tag, mark);
    if (wanted->kind == Kind::real && value.is(Kind::integer)) return value.as_real();
    if (!value.is(wanted->kind)) {
      refuse(ErrorCode::corrupt,
             "the YAML value " + printable(text, 60) + " is no " + std::string(type), mark);
    }
    return value;
  }

  void push(Value container, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (frames_.size() >= kDeepest) {
      refuse(ErrorCode::limit, "YAML nested deeper than " + std::to_string(kDeepest), mark);
    }
    Frame& frame = frames_.emplace_back();
    frame.value = std::move(container);
    frame.anchor = anchor;
    frame.mark = mark;
  }

  void pop() {
    const Frame frame = std::move(frames_.back());
    frames_.pop_back();
    add(frame.value, frame.nodes, frame.anchor, frame.mark);
  }

  void add(const Value& value, std::size_t nodes, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (anchor != YAML::NullAnchor) anchors_[anchor] = {value, nodes};
    if (frames_.empty()) {
      root_ = value;
      return;
    }
    Frame& frame = frames_.back();
    frame.nodes += nodes;
    if (frame.nodes > most_nodes_) {
      refuse(ErrorCode::limit, "YAML aliases multiply the document more than tenfold", mark);
    }
    add_to(frame, value, mark);
  }

  static void add_to(Frame& frame, const Value& value, const YAML::Mark& mark) {
    if (frame.value.is(Kind::list)) {
      frame.value.items().push_back(value);
    } else if (!frame.key) {
      set_key(frame, value, mark);
    } else {
      frame.value.set_item(*frame.key, value);
      frame.key.reset();
    }
  }

  static void require_key(const Value& key, const YAML::Mark& mark) {
    if (is_one_of(key.kind(), Kind::list, Kind::dict, Kind::none)) {
      refuse(ErrorCode::corrupt, "a YAML key is " + std::string(describe(key.kind())), mark);
    }
    if (key.is(Kind::string) && key.as_string() == "<<") {
      refuse(ErrorCode::unsupported, "a YAML merge key", mark);
    }
  }

  static bool has_key(const Value& dict, const Value& key) {
    if (key.is(Kind::string)) return dict.find(key.as_string()) != nullptr;
    return std::ranges::count(dict.pairs(), key, &Value::Pair::first) != 0;
  }

  static void set_key(Frame& frame, const Value& key, const YAML::Mark& mark) {
    require_key(key, mark);
    if (has_key(frame.value, key))
      refuse(ErrorCode::corrupt, "the YAML key " + render(key, 60) + " is twice", mark);
    frame.key = key;
  }

  const std::size_t most_nodes_;
  Value root_;
  std::vector<Frame> frames_;
  std::map<YAML::anchor_t, Anchored> anchors_;  // those that are complete
};

// Everything but tab and line ends below space; UTF-16 has NULs.
bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20 && !is_one_of(c, '\t', '\n', '\r');
}

void require_text(ByteView bytes) {
  if (bytes.size() > kYamlLimit) {
    throw Error(ErrorCode::limit, "YAML of " + std::to_string(bytes.size()) +
                                      " bytes, expected at most " + std::to_string(kYamlLimit));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with("\xef\xbb\xbf")) {
    throw Error(ErrorCode::corrupt, "YAML that begins with a byte order mark").at_offset(0);
  }
  const auto control = std::find_if(text.begin(), text.end(), is_control);
  if (control != text.end()) {
    throw Error(ErrorCode::corrupt, "a control character in YAML")
        .at_offset(static_cast<std::uint64_t>(control - text.begin()));
  }
  pickle::require_utf8(text);
}

// Null: the document is no dict, or has no such key.
const Value* find_at_root(const Value& root, std::string_view key) {
  return root.is(Kind::dict) ? root.find(key) : nullptr;
}

bool is_world_size(const Value& value) {
  return value.is(Kind::integer) && value.as_integer().big.empty() && value.as_int() >= 1 &&
         value.as_int() <= kMostRanks;
}

}  // namespace

Value parse_yaml(ByteView text) {
  require_text(text);
  MemoryBuffer buffer(text);
  std::istream stream(&buffer);
  Builder builder(text.size());
  try {
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return {};
    Builder second(text.size());
    if (parser.HandleNextDocument(second)) {
      throw Error(ErrorCode::corrupt, "several YAML documents, expected one");
    }
  } catch (const YAML::Exception& error) {
    refuse(ErrorCode::corrupt, "not YAML: " + error.msg, error.mark);
  }
  return builder.root();
}

int world_size_of(ByteView metadata_yaml) {
  const Value root = parse_yaml(metadata_yaml);
  const Value* size = find_at_root(root, "world_size");
  if (size == nullptr) throw Error(ErrorCode::corrupt, "no world_size in the metadata");
  if (!is_world_size(*size)) {
    throw Error(ErrorCode::corrupt, "a world_size of " + render(*size, 60) +
                                        ", expected a number from 1 to " +
                                        std::to_string(kMostRanks));
  }
  return static_cast<int>(size->as_int());
}

std::optional<std::string> sharded_checkpointer_of(ByteView config_yaml) {
  const Value root = parse_yaml(config_yaml);
  const Value* name = find_at_root(root, "sharded_checkpointer");
  if (name == nullptr || !name->is(Kind::string)) return std::nullopt;
  return name->as_string();
}

}  // namespace tessera::olmo
