#include "storage/hub/hub_answers.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "storage/http/link_header.h"
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

// Git has no other names.
void require_object_name(const std::string& path) {
  try {
    require_safe_name(path, {});
  } catch (const Error&) {
    refuse_json("a tree has a name that no file can have");
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
  if (type.empty()) refuse_json("an entry of a tree has no type");
  if (!is_one_of(type, "file", "directory")) return std::nullopt;
  require_object_name(entry.path);
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

std::string query_of(const std::string& url) {
  const std::size_t mark = url.find('?');
  if (mark == std::string::npos) refuse_json("the next page has no query");
  std::string query = url.substr(mark + 1);
  const auto is_of_query = [](char c) { return c > 0x20 && c < 0x7f && c != '#'; };
  if (query.empty() || !std::ranges::all_of(query, is_of_query))
    refuse_json("the query of the next page is none");
  return query;
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
  std::string query;
  for (const WebLink& one : links_in(link)) {
    if (std::ranges::find(one.relations, "next") == one.relations.end()) continue;
    std::string found = query_of(one.target);
    if (!query.empty() && query != found) refuse_json("there are two next pages");
    query = std::move(found);
  }
  return query;
}

}  // namespace tessera::hub
