#include "storage/hub/hub_answers.h"

#include <algorithm>
#include <limits>
#include <optional>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera::hub {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse_json(const std::string& why) {
  throw Error(ErrorCode::corrupt, "an answer that is none of the Hugging Face Hub: " + why);
}

// "": there is none, or it is no text.
std::string text_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

bool is_object_name(const std::string& path) {
  try {
    require_safe_name(path, {});
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_hex(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'f');
}

// None: it is of no kind that a store has.
std::optional<HubEntry> entry_of(const Json& json) {
  if (!json.is_object()) refuse_json("an entry of a tree is no object");
  HubEntry entry{.path = text_of(json, "path"), .content = text_of(json, "oid")};
  const std::string type = text_of(json, "type");
  entry.is_directory = type == "directory";
  if (!is_one_of(type, "file", "directory") || !is_object_name(entry.path)) return std::nullopt;
  if (entry.is_directory) return entry;
  const auto size = json.find("size");
  if (size == json.end() || !size->is_number_unsigned()) refuse_json("a file has no size");
  entry.size = size->get<std::uint64_t>();
  if (entry.size > std::numeric_limits<std::int64_t>::max()) refuse_json("no file is that large");
  const auto lfs = json.find("lfs");
  const bool is_large = lfs != json.end() && lfs->is_object();
  if (is_large) entry.content = text_of(*lfs, "oid");
  return entry;
}

// What one link of a header says: where it leads, and its parameters.
struct Link {
  std::string_view url;
  std::string_view parameters = {};
};

// Takes the first link. None: there is no more.
std::optional<Link> take_link(std::string_view& header) {
  const std::size_t begin = header.find('<');
  const std::size_t end = header.find('>', std::min(begin, header.size()));
  if (end == std::string_view::npos) return std::nullopt;
  Link link{.url = header.substr(begin + 1, end - begin - 1)};
  header.remove_prefix(end + 1);
  link.parameters = header.substr(0, std::min(header.find('<'), header.size()));
  header.remove_prefix(link.parameters.size());
  return link;
}

}  // namespace

std::string commit_in(std::string_view json) {
  const Json parsed = Json::parse(json, nullptr, false);
  const std::string commit = parsed.is_object() ? text_of(parsed, "sha") : std::string();
  constexpr std::size_t kShortest = 40, kLongest = 64;  // digits of SHA-1 and SHA-256
  const bool is_commit = commit.size() >= kShortest && commit.size() <= kLongest &&
                         std::ranges::all_of(commit, is_hex);
  if (!is_commit) refuse_json("a revision has no commit");
  return commit;
}

std::vector<HubEntry> entries_in(std::string_view json) {
  const Json parsed = Json::parse(json, nullptr, false);
  if (!parsed.is_array()) refuse_json("a tree is no list");
  std::vector<HubEntry> entries;
  for (const Json& one : parsed)
    if (auto entry = entry_of(one)) entries.push_back(*std::move(entry));
  return entries;
}

std::string next_query(std::string_view link) {
  while (const auto one = take_link(link)) {
    if (one->parameters.find("rel=\"next\"") == std::string_view::npos) continue;
    const std::size_t mark = one->url.find('?');
    if (mark == std::string_view::npos) refuse_json("the next page has no query");
    return std::string(one->url.substr(mark + 1));
  }
  return {};
}

}  // namespace tessera::hub
