#include "storage/s3/profile_files.h"

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

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

std::string path_of(const char* name, const std::string& usual) {
  const std::string given = variable(name);
  if (!given.empty()) return given;
  const std::string home = variable("HOME");
  return home.empty() ? std::string() : home + "/.aws/" + usual;
}

std::map<std::string, Profile> profiles_in(const std::string& path) {
  if (path.empty()) return {};
  try {
    return parse_profiles(read_small_file(path));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return {};
    throw;
  }
}

}  // namespace

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
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

std::map<std::string, Profile> parse_profiles(const std::string& text) {
  std::map<std::string, Profile> profiles;
  Profile* current = nullptr;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::string plain = trimmed(line);
    if (plain.empty() || plain[0] == '#' || plain[0] == ';') continue;
    if (plain[0] == '[') {
      const std::size_t end = plain.find(']');
      current = end == std::string::npos ? nullptr : &profiles[trimmed(plain.substr(1, end - 1))];
      continue;
    }
    const std::size_t equals = plain.find('=');
    const bool is_nested = kBlanks.find(line[0]) != std::string_view::npos;
    if (current == nullptr || is_nested || equals == std::string::npos) continue;
    (*current)[trimmed(plain.substr(0, equals))] = trimmed(plain.substr(equals + 1));
  }
  return profiles;
}

std::optional<Profile> read_profile(const std::string& name) {
  auto configured = profiles_in(path_of("AWS_CONFIG_FILE", "config"));
  auto secrets = profiles_in(path_of("AWS_SHARED_CREDENTIALS_FILE", "credentials"));
  const auto config = configured.find(name == "default" ? name : "profile " + name);
  const auto secret = secrets.find(name);
  if (config == configured.end() && secret == secrets.end()) return std::nullopt;
  Profile both = secret == secrets.end() ? Profile() : std::move(secret->second);
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
