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
  return path.starts_with("~/") ? variable("HOME") + path.substr(1) : path;
}

std::string token_file() {
  if (const std::string path = variable("HF_TOKEN_PATH"); !path.empty()) return in_home(path);
  if (const std::string home = variable("HF_HOME"); !home.empty()) return in_home(home) + "/token";
  const std::string cache = variable("XDG_CACHE_HOME");
  return in_home(cache.empty() ? "~/.cache" : cache) + "/huggingface/token";
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
  if (is_switched_on("HF_HUB_OFFLINE")) {
    throw Error(ErrorCode::unsupported,
                "HF_HUB_OFFLINE is set, so nothing is asked of the Hugging Face Hub");
  }
  HubAccess access{.endpoint = endpoint_of_environment()};
  find_token(access);
  return access;
}

}  // namespace tessera::hub
