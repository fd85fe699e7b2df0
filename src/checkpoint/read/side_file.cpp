#include "checkpoint/read/side_file.h"

#include <algorithm>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/text.h"
#include "checkpoint/read/json_writer.h"
#include "tessera/error.h"
#include "tessera/library.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr int kTailsVersion = 2;  // of a side file whose data files have tails
constexpr std::string_view kPrefix = "tessera-";
constexpr std::string_view kSuffix = ".json";
// The place of the checksum's digits: the text begins with exactly this.
constexpr std::string_view kHead = "{\n \"checksum\": \"";
constexpr const char* kZeros = "0000000000000000";

ByteView bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

void require_known(const Json& json) {
  const int version = json.at("version").get<int>();
  if (version != kVersion && version != kTailsVersion) {
    throw Error(ErrorCode::unsupported,
                "the side file has version " + json.at("version").dump() + ", known are 1 and 2");
  }
  if (json.at("block").get<std::uint64_t>() != kDigestBlock) {
    throw Error(ErrorCode::unsupported,
                "the side file has blocks of " + json.at("block").dump() + " bytes");
  }
}

FileDigests digests_of_row(const Json& row, const std::string& name) {
  FileDigests file;
  file.size = row.at(0).get<std::uint64_t>();
  file.blocks = digests_of_text(row.at(1).get_ref<const std::string&>());
  if (digest_blocks(file.size) != file.blocks.size()) {
    throw Error(ErrorCode::corrupt, "the side file has " + std::to_string(file.blocks.size()) +
                                        " digests for a file of " + std::to_string(file.size) +
                                        " bytes")
        .at_key(name);
  }
  return file;
}

void add_tail(const Json& row, const std::string& name, DigestsByName& files) {
  FileDigests file;
  file.size = row.at(0).get<std::uint64_t>();
  file.tail = digest_of_text(row.at(1).get_ref<const std::string&>());
  if (!files.emplace(name, std::move(file)).second)
    throw Error(ErrorCode::corrupt, "the side file has two kinds of digests of one file")
        .at_key(name);
}

SideFile from_json(const Json& json) {
  require_known(json);
  SideFile side_file;
  side_file.save_id = json.at("save_id").get<std::string>();
  side_file.producer = json.at("producer").get<std::string>();
  for (const auto& [name, row] : json.at("files").items()) {
    side_file.files.emplace(name, digests_of_row(row, name));
  }
  if (json.at("version").get<int>() == kTailsVersion) {
    for (const auto& [name, row] : json.at("tails").items()) add_tail(row, name, side_file.files);
  }
  if (json.contains("tree")) side_file.types = json.at("tree").dump(-1, ' ', true);
  return side_file;
}

// A member with those that have tails, or those that have none.
void append_files(JsonWriter& json, const DigestsByName& files, bool with_tails) {
  json.key(with_tails ? "tails" : "files");
  json.begin('{');
  for (const auto& [name, file] : files) {
    if (file.tail.has_value() != with_tails) continue;
    json.name(name);
    json.begin('[');
    json.raw(std::to_string(file.size));
    json.text(file.tail ? digest_text(*file.tail) : digests_text(file.blocks));
    json.end(']');
  }
  json.end('}');
}

}  // namespace

std::string own_producer() {
  return "tessera " + std::string(version());
}

std::string side_file_name(const std::string& save_id) {
  return std::string(kPrefix) + save_id + std::string(kSuffix);
}

bool is_side_file_name(std::string_view name) {
  return name.starts_with(kPrefix) && name.ends_with(kSuffix) && name != kDirectorySideFile &&
         name.find('/') == std::string_view::npos;
}

void stamp_checksum(std::string& text, std::size_t at) {
  text.replace(at, kDigestDigits, kZeros);
  text.replace(at, kDigestDigits, digest_text(digest64(bytes_of(text))));
}

bool has_checksum(std::string_view text, std::size_t at) {
  if (at > text.size() || text.size() - at < kDigestDigits) return false;
  std::string stamped(text);
  stamp_checksum(stamped, at);
  return stamped == text;
}

std::string digests_text(const Digests& digests) {
  std::string text;
  text.reserve(digests.size() * kDigestDigits);
  for (const std::uint64_t digest : digests) text += digest_text(digest);
  return text;
}

Digests digests_of_text(std::string_view text) {
  if (text.size() % kDigestDigits != 0)
    throw Error(ErrorCode::corrupt, "a list of digests ends within a digest");
  Digests digests;
  digests.reserve(text.size() / kDigestDigits);
  for (std::size_t at = 0; at < text.size(); at += kDigestDigits)
    digests.push_back(digest_of_text(text.substr(at, kDigestDigits)));
  return digests;
}

void require_side_file_can_name(const std::string& file) {
  std::string_view rest = file;
  while (!rest.empty()) {
    const Rune rune = first_rune(rest);
    if (rune.length == 0 || is_surrogate(rune.code)) {
      throw Error(ErrorCode::unsupported,
                  "a side file, which is JSON, cannot name a file whose name is not UTF-8")
          .at_path(file);
    }
    rest.remove_prefix(rune.length);
  }
}

std::string encode_side_file(const SideFile& side_file) {
  for (const auto& file : side_file.files) require_side_file_can_name(file.first);
  const bool has_tails = std::ranges::any_of(
      side_file.files, [](const auto& file) { return file.second.tail.has_value(); });
  JsonWriter json;
  json.begin('{');
  json.key("checksum");
  json.text(kZeros);
  json.key("version");
  json.integer(has_tails ? kTailsVersion : kVersion);
  json.key("save_id");
  json.text(side_file.save_id);
  json.key("producer");
  json.text(side_file.producer);
  json.key("block");
  json.integer(kDigestBlock);
  if (!side_file.types.empty()) {
    json.key("tree");
    json.raw(side_file.types);
  }
  append_files(json, side_file.files, false);
  if (has_tails) append_files(json, side_file.files, true);
  json.end('}');
  std::string text = json_in_lines(json.json()) + "\n";
  stamp_checksum(text, kHead.size());
  return text;
}

SideFile decode_side_file(std::string_view text) {
  if (!text.starts_with(kHead) || !has_checksum(text, kHead.size())) {
    throw Error(ErrorCode::corrupt,
                "the side file differs from its own checksum: it was changed or is damaged");
  }
  try {
    return from_json(Json::parse(text));
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt, "the side file is malformed: " + json_fault(error));
  }
}

namespace {

// The save's id is among the last bytes of the file, behind the digests.
constexpr std::uint64_t kEnd = 256;

}  // namespace

std::uint64_t save_mark_of(const Store& directory) {
  if (!directory.exists(kStateFile)) return 0;
  const auto source = directory.open(kStateFile);
  std::vector<std::byte> end(static_cast<std::size_t>(std::min(source->size(), kEnd)));
  source->read_at(source->size() - end.size(), end);
  return digest64(end);
}

bool holds_other_save(const Store& directory, std::uint64_t mark) {
  const std::uint64_t held = save_mark_of(directory);
  return held != 0 && held != mark;
}

}  // namespace tessera
