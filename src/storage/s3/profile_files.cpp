#include "storage/s3/profile_files.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/environment.h"
#include "storage/posix/system.h"
#include "storage/s3/credentials.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr std::string_view kBlanks = " \t\r";

std::string trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin));
}

std::string lowered(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string path_of(const char* name, const std::string& usual) {
  const std::string given = variable(name), home = variable("HOME");
  if (given.starts_with("~/")) return home + given.substr(1);
  if (!given.empty()) return given;
  return home.empty() ? std::string() : home + "/.aws/" + usual;
}

std::map<std::string, Profile> profiles_in(const std::string& path, SectionsAre sections) {
  if (path.empty()) return {};
  try {
    return parse_profiles(read_small_file(path), sections);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return {};
    throw;
  }
}

std::string unquoted(const std::string& text) {
  const bool is_quoted =
      text.size() >= 2 && (text[0] == '"' || text[0] == '\'') && text.back() == text[0];
  return is_quoted ? text.substr(1, text.size() - 2) : text;
}

// The profile that "[...]" begins; none: it begins something else.
std::optional<std::string> profile_of(const std::string& line, SectionsAre sections) {
  const std::size_t end = line.find(']');
  if (end == std::string::npos) return std::nullopt;
  const std::string section = trimmed(line.substr(1, end - 1));
  if (sections == SectionsAre::names || section == "default") return unquoted(section);
  const std::size_t blank = section.find_first_of(kBlanks);
  if (blank == std::string::npos) return std::nullopt;
  const std::string kind = section.substr(0, blank);
  std::string name = unquoted(trimmed(section.substr(blank)));
  if (kind == "services") return services_section(name);
  return kind == "profile" ? std::optional(std::move(name)) : std::nullopt;
}

}  // namespace

// No profile can have that name.
std::string services_section(const std::string& name) {
  return "services\n" + name;
}

std::string variable(const char* name) {
  return environment_variable(name).value_or(std::string());
}

std::string read_small_file(const std::string& path) {
  constexpr std::size_t kMost = 1U << 20U;
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw_errno(errno != 0 ? errno : ENOENT, "open", path);
  std::string text(kMost + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) throw_errno(EIO, "read", path);
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMost) throw Error(ErrorCode::limit, "more than 1 MiB").at_path(path);
  return text;
}

std::string without_line_end(std::string text) {
  while (text.ends_with('\n') || text.ends_with('\r')) text.pop_back();
  return text;
}

std::map<std::string, Profile> parse_profiles(const std::string& text, SectionsAre sections) {
  std::map<std::string, Profile> profiles;
  Profile* current = nullptr;
  std::size_t indent = std::string::npos;  // of the setting above; npos: a section begins
  std::string above;                       // a setting of services whose own ones follow
  bool are_services = false;
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // of UTF-8, which some editors write
  std::istringstream lines(text.substr(text.starts_with(kMark) ? kMark.size() : 0));
  for (std::string line; std::getline(lines, line);) {
    const std::string plain = trimmed(line);
    if (plain.empty() || plain[0] == '#' || plain[0] == ';') continue;
    const std::size_t indented = line.find_first_not_of(kBlanks);
    const std::size_t equals = plain.find('=');
    if (indented > indent) {
      if (are_services && equals != std::string::npos && !above.empty())
        (*current)[above + "." + lowered(trimmed(plain.substr(0, equals)))] =
            trimmed(plain.substr(equals + 1));
      continue;
    }
    if (plain[0] == '[') {
      const auto name = profile_of(plain, sections);
      current = name ? &profiles[*name] : nullptr;
      are_services = name && name->starts_with(services_section(""));
      above.clear();
      indent = std::string::npos;
      continue;
    }
    indent = indented;
    if (current == nullptr || equals == std::string::npos) continue;
    above = lowered(trimmed(plain.substr(0, equals)));
    (*current)[above] = trimmed(plain.substr(equals + 1));
  }
  return profiles;
}

std::optional<Profile> read_profile(const std::string& name) {
  auto configured = profiles_in(path_of("AWS_CONFIG_FILE", "config"), SectionsAre::of_config);
  auto secrets =
      profiles_in(path_of("AWS_SHARED_CREDENTIALS_FILE", "credentials"), SectionsAre::names);
  const auto config = configured.find(name);
  const auto secret = secrets.find(name);
  if (config == configured.end() && secret == secrets.end()) return std::nullopt;
  Profile both = secret == secrets.end() ? Profile() : std::move(secret->second);
  // Keys and their token are of one file.
  if (config != configured.end() && both.contains("aws_access_key_id")) {
    for (const char* name_of_key : {"aws_secret_access_key", "aws_session_token"})
      config->second.erase(name_of_key);
  }
  if (config != configured.end()) both.merge(config->second);
  return both;
}

std::optional<std::string> profile_setting(const std::string& profile, const std::string& name) {
  const auto found = read_profile(profile);
  if (!found) return std::nullopt;
  const auto setting = found->find(name);
  return setting == found->end() ? std::nullopt : std::optional(setting->second);
}

}  // namespace tessera::s3
