#include "storage/s3/credentials.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>
#include <pugixml.hpp>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "storage/posix/system.h"
#include "storage/s3/providers.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

using std::chrono::system_clock;

constexpr std::chrono::minutes kBefore{5};
// What is not new enough, or fails, is not asked for at each request.
constexpr std::chrono::seconds kBetweenLooks{30};

bool is_anonymous(const std::string& profile) {
  const std::string unsigned_requests = variable("AWS_NO_SIGN_REQUEST");
  return profile == "anonymous" || unsigned_requests == "1" || unsigned_requests == "true";
}

}  // namespace

class CredentialSource::Impl {
 public:
  Impl(Find find, Now now) : find_(std::move(find)), now_(std::move(now)) {}

  std::optional<Credentials> get() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (holds_until(now_() + kBefore)) return found_;
      // One asks; the others go on with what still holds, or wait for it.
      if (holds_until(now_()) && (is_asking_ || now_() < next_look_)) return found_;
      if (!is_asking_) return asked(lock);
      wait_for_change(answered_, lock);
    }
  }

  void drop() {
    const std::lock_guard lock(mutex_);
    found_.reset();
  }

 private:
  [[nodiscard]] bool holds_until(system_clock::time_point time) const {
    return found_ && (!found_->expires || time < *found_->expires);
  }

  std::optional<Credentials> asked(std::unique_lock<std::mutex>& lock) {
    is_asking_ = true;
    lock.unlock();
    std::optional<Credentials> fresh;
    std::exception_ptr failure;
    try {
      fresh = find_();
      if (fresh->expires && *fresh->expires <= now_())
        throw Error(ErrorCode::io, "the credentials that were found have expired");
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    is_asking_ = false;
    answered_.notify_all();
    next_look_ = now_() + kBetweenLooks;
    if (!failure) return found_ = std::move(fresh);
    if (holds_until(now_())) return found_;
    std::rethrow_exception(failure);
  }

  const Find find_;
  const Now now_;
  std::mutex mutex_;
  std::condition_variable answered_;
  std::optional<Credentials> found_;    // guarded by mutex_, as are the following
  bool is_asking_ = false;              // a thread is in find_()
  system_clock::time_point next_look_;  // while what there is holds
};

CredentialSource::CredentialSource(std::string profile, std::shared_ptr<HttpClient> client) {
  if (profile.empty()) profile = variable("AWS_PROFILE");
  if (is_anonymous(profile)) return;
  find_ = [profile = std::move(profile), client = std::move(client)] {
    return find_credentials(profile, *client);
  };
  now_ = [] { return system_clock::now(); };
}
CredentialSource::CredentialSource(Find find, Now now)
    : find_(std::move(find)), now_(std::move(now)) {}
CredentialSource::~CredentialSource() = default;

CredentialSource::Impl& CredentialSource::impl() const {
  return impl_.get([this] { return std::make_unique<Impl>(find_, now_); });
}

std::optional<Credentials> CredentialSource::get() {
  return find_ ? impl().get() : std::nullopt;
}

void CredentialSource::drop() {
  if (find_) impl().drop();
}

namespace {

using Json = nlohmann::json;
using std::chrono::seconds;
using std::chrono::system_clock;

[[noreturn]] void refuse_time() {
  throw Error(ErrorCode::corrupt, "credentials with an Expiration that is no time");
}

// The offset of "Z", "+01:00", "-0130" or nothing.
seconds offset_of(std::string_view zone) {
  if (zone.empty() || zone == "Z") return seconds(0);
  std::string digits(zone.substr(1));
  std::erase(digits, ':');
  if (!is_one_of(zone[0], '+', '-') || digits.size() != 4 || !std::ranges::all_of(digits, is_digit))
    refuse_time();
  const int number = std::stoi(digits);
  const seconds ahead((number / 100 * 60 + number % 100) * 60);
  return zone[0] == '+' ? ahead : -ahead;
}

// None: it is absent or null.
std::optional<std::string> text_in(const Json& json, const char* name, const std::string& from) {
  const auto found = json.find(name);
  if (found == json.end() || found->is_null()) return std::nullopt;
  if (!found->is_string())
    refuse_credentials(from, "in the answer " + std::string(name) + " is no text");
  return found->get<std::string>();
}

std::string needed_in(const Json& json, const char* name, const std::string& from) {
  auto text = text_in(json, name, from);
  if (!text || text->empty()) refuse_credentials(from, "the answer has no " + std::string(name));
  return *std::move(text);
}

}  // namespace

void refuse_credentials(const std::string& from, const std::string& why) {
  throw Error(ErrorCode::io, "credentials of " + from + ": " + why);
}

system_clock::time_point parse_time(const std::string& text) {
  std::tm time{};
  const char* const end = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &time);
  if (end == nullptr) refuse_time();
  std::string_view zone(end);
  if (zone.starts_with('.')) {
    const std::size_t digits = std::min(zone.find_first_not_of("0123456789", 1), zone.size());
    if (digits == 1) refuse_time();
    zone.remove_prefix(digits);
  }
  const seconds since = seconds(::timegm(&time)) - offset_of(zone);
  // "Never" is often year 9999, and a clock of nanoseconds ends in 2262.
  const auto first = std::chrono::ceil<seconds>(system_clock::time_point::min().time_since_epoch());
  const auto last = std::chrono::floor<seconds>(system_clock::time_point::max().time_since_epoch());
  return system_clock::time_point(std::clamp(since, first, last));
}

Credentials credentials_of_json(std::string_view text, const char* token, const std::string& from) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) refuse_credentials(from, "the answer is no JSON object");
  Credentials found{.key_id = needed_in(json, "AccessKeyId", from),
                    .secret = needed_in(json, "SecretAccessKey", from),
                    .token = text_in(json, token, from).value_or("")};
  if (const auto expires = text_in(json, "Expiration", from)) found.expires = parse_time(*expires);
  return found;
}

Credentials credentials_of_xml(std::string_view text, const std::string& action,
                               const std::string& from) {
  pugi::xml_document document;
  if (!document.load_buffer(text.data(), text.size())) refuse_credentials(from, "no XML came back");
  const pugi::xml_node node = document.child((action + "Response").c_str())
                                  .child((action + "Result").c_str())
                                  .child("Credentials");
  const auto needed = [&](const char* name) {
    std::string value = node.child(name).text().get();
    if (value.empty()) refuse_credentials(from, "the answer has no " + std::string(name));
    return value;
  };
  return {.key_id = needed("AccessKeyId"),
          .secret = needed("SecretAccessKey"),
          .token = needed("SessionToken"),
          .expires = parse_time(needed("Expiration"))};
}

namespace {

constexpr std::string_view kBlanks = " \t\r";

std::string trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin));
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
