#include "storage/hub/hub_url.h"

#include <algorithm>

#include "base/text.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera::hub {
namespace {

constexpr std::string_view kScheme = "hf://";

[[noreturn]] void refuse_url(std::string_view url, ErrorCode code, const std::string& why) {
  throw Error(code, why).at_path(std::string(url));
}

// Takes what stands before the next slash, and the slash.
std::string_view take_part(std::string_view& rest) {
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  const std::string_view part = rest.substr(0, slash);
  rest.remove_prefix(std::min(slash + 1, rest.size()));
  return part;
}

// What the Hub allows in the names of organizations and repositories.
bool is_repo_name(std::string_view name) {
  const auto is_allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '-' ||
           c == '_' || c == '.';
  };
  return !is_one_of(name, "", ".", "..") && std::ranges::all_of(name, is_allowed);
}

// How long the revision at the start of `text` is: up to the next slash, but for the references of
// the Hub that have some.
std::size_t length_of_revision(std::string_view text) {
  for (const std::string_view prefix : {"refs/pr/", "refs/convert/"}) {
    if (!text.starts_with(prefix)) continue;
    const std::size_t end = std::min(text.find('/', prefix.size()), text.size());
    if (end > prefix.size()) return end;
  }
  return std::min(text.find('/'), text.size());
}

}  // namespace

HubUrl parse_hub_url(std::string_view url) {
  constexpr const char* kForm =
      "a place on the Hugging Face Hub is hf://ORG/MODEL[@REVISION][/FILE]";
  if (!url.starts_with(kScheme)) refuse_url(url, ErrorCode::invalid_argument, kForm);
  HubUrl parsed;
  std::string_view rest = url.substr(kScheme.size());
  std::string_view first = take_part(rest);
  if (is_one_of(first, "buckets", "kernels")) {
    refuse_url(url, ErrorCode::unsupported,
               "of the Hugging Face Hub models, datasets and spaces can be read, not its " +
                   std::string(first));
  }
  if (is_one_of(first, "models", "datasets", "spaces")) {
    parsed.type = first;
    first = take_part(rest);
  }
  const std::size_t end = std::min(rest.find_first_of("/@"), rest.size());
  const std::string_view name = rest.substr(0, end);
  if (!is_repo_name(first) || !is_repo_name(name))
    refuse_url(url, ErrorCode::invalid_argument, kForm);
  parsed.repo = std::string(first) + "/" + std::string(name);
  rest.remove_prefix(end);
  if (rest.starts_with('@')) {
    const std::string_view revision = rest.substr(1, length_of_revision(rest.substr(1)));
    if (revision.empty()) refuse_url(url, ErrorCode::invalid_argument, kForm);
    parsed.revision = percent_decoded(revision);
    rest.remove_prefix(1 + revision.size());
  }
  parsed.root = url.substr(0, url.size() - rest.size());
  parsed.names_directory = rest.empty() || rest.ends_with('/');
  while (rest.ends_with('/')) rest.remove_suffix(1);
  if (!rest.empty()) parsed.path = rest.substr(1);
  return parsed;
}

HubUrl above(const HubUrl& url) {
  HubUrl parent = url;
  const std::size_t slash = url.path.rfind('/');
  parent.path.resize(slash == std::string::npos ? 0 : slash);
  parent.names_directory = true;
  return parent;
}

std::string to_string(const HubUrl& url) {
  return url.path.empty() ? url.root : url.root + "/" + url.path;
}

}  // namespace tessera::hub
