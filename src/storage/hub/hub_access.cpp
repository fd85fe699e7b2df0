#include "storage/hub/hub_access.h"

#include <algorithm>
#include <string_view>

#include "base/text.h"
#include "storage/s3/credentials.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera::hub {
namespace {

using s3::read_small_file;
using s3::variable;

constexpr const char* kPublicHub = "https://huggingface.co";

// As huggingface_hub reads its switches.
bool is_switched_on(const char* name) {
  return is_one_of(lowered(variable(name)), "1", "on", "yes", "true");
}

// Without blanks and line ends, which editors and `echo` leave at its end.
std::string cleaned(std::string token) {
  std::erase_if(token, [](char c) { return c == '\r' || c == '\n'; });
  constexpr std::string_view kBlank = " \t";
  const std::size_t begin = std::min(token.find_first_not_of(kBlank), token.size());
  const std::size_t end = token.find_last_not_of(kBlank) + 1;  // 0: all of it is blank
  return token.substr(begin, std::max(begin, end) - begin);
}

std::string in_home(const std::string& path) {
  return path == "~" || path.starts_with("~/") ? variable("HOME") + path.substr(1) : path;
}

// With the values of $NAME and ${NAME}, where such a variable is set.
std::string expanded(std::string_view path) {
  const auto is_of_name = [](char c) {
    return is_digit(c) || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  std::string text;
  while (!path.empty()) {
    const bool is_braced = path.starts_with("${");
    const std::string_view rest = path.substr(is_braced ? 2 : 1);
    const auto* const end =
        is_braced ? std::ranges::find(rest, '}') : std::ranges::find_if_not(rest, is_of_name);
    const std::string name(rest.begin(), end);
    const auto value = path[0] == '$' && !(is_braced && end == rest.end())
                           ? environment_variable(name.c_str())
                           : std::nullopt;
    if (!value) {
      text += path[0];
      path.remove_prefix(1);
      continue;
    }
    text += *value;
    path = {end + (is_braced ? 1 : 0), path.end()};
  }
  return text;
}

// As huggingface_hub reads paths.
std::string path_of(const std::string& text) {
  return expanded(in_home(text));
}

std::string token_file() {
  if (const std::string path = variable("HF_TOKEN_PATH"); !path.empty()) return path_of(path);
  if (const std::string home = variable("HF_HOME"); !home.empty()) return path_of(home) + "/token";
  const std::string cache = variable("XDG_CACHE_HOME");
  return path_of(cache.empty() ? "~/.cache" : cache) + "/huggingface/token";
}

std::string token_in(const std::string& file) {
  try {
    return cleaned(read_small_file(file));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return {};
    throw;
  }
}

void find_token(HubAccess& access) {
  if (is_switched_on("HF_HUB_DISABLE_IMPLICIT_TOKEN")) return;
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}) {
    access.token_from = name;
    access.token = cleaned(variable(name));
    if (!access.token.empty()) return;
  }
  access.token_from = token_file();
  access.token = token_in(access.token_from);
}

Uri endpoint_of_environment() {
  std::string text = variable("HF_ENDPOINT");
  while (text.ends_with('/')) text.pop_back();
  if (text.empty()) text = kPublicHub;
  if (!is_web(text) || text.find('?') != std::string::npos) {
    throw Error(ErrorCode::invalid_argument,
                "HF_ENDPOINT is no address of a Hub: it has to be https://HOST");
  }
  return parse_uri(text);
}

}  // namespace

bool HubAccess::is_own(const std::string& url) const {
  const Uri uri = parse_uri(url);
  return uri.scheme == endpoint.scheme &&
         lowered(authority_of(uri)) == lowered(authority_of(endpoint));
}

HubAccess hub_access() {
  const char* const offline =
      variable("HF_HUB_OFFLINE").empty() ? "TRANSFORMERS_OFFLINE" : "HF_HUB_OFFLINE";
  if (is_switched_on(offline)) {
    throw Error(ErrorCode::unsupported,
                std::string(offline) + " is set, so nothing is asked of the Hugging Face Hub");
  }
  HubAccess access{.endpoint = endpoint_of_environment()};
  find_token(access);
  return access;
}

}  // namespace tessera::hub
