#include "storage/s3/settings.h"

#include <algorithm>
#include <cctype>

#include "storage/s3/credentials.h"
#include "storage/s3/profile_files.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

std::string first_of(std::initializer_list<const char*> names) {
  for (const char* const name : names)
    if (std::string value = variable(name); !value.empty()) return value;
  return {};
}

std::string without_slashes(std::string text) {
  while (text.ends_with('/')) text.pop_back();
  return text;
}

void require_bucket(const std::string& name) {
  const bool is_plain = std::ranges::all_of(name, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
  });
  if (is_plain && !name.empty() && name.size() < 256) return;
  throw Error(ErrorCode::invalid_argument,
              "'" + name.substr(0, 80) + "' cannot be a bucket's name");
}

// OLMo's schemes name their endpoint and profile by variables of their own (checkpoint-rows O-07).
std::string needed_endpoint(const char* name, const std::string& scheme) {
  std::string value = variable(name);
  if (value.empty()) {
    throw Error(ErrorCode::invalid_argument,
                scheme + ":// needs " + name + ", the URL of the server");
  }
  return value;
}

void settle_s3(Settings& settings) {
  settings.profile = variable("AWS_PROFILE");
  const std::string profile = settings.profile.empty() ? "default" : settings.profile;
  settings.region = first_of({"AWS_REGION", "AWS_DEFAULT_REGION"});
  if (settings.region.empty())
    settings.region = profile_setting(profile, "region").value_or("us-east-1");
  settings.endpoint = first_of({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  if (settings.endpoint.empty())
    settings.endpoint = profile_setting(profile, "endpoint_url").value_or("");
  settings.is_path_style = !settings.endpoint.empty();
  if (!settings.endpoint.empty()) return;
  settings.endpoint = "https://s3." + settings.region + ".amazonaws.com";
  // The certificate of a host name has one more label, not two.
  settings.is_path_style = settings.bucket.find('.') != std::string::npos;
}

}  // namespace

Settings settings_for(const Uri& url) {
  Settings settings;
  settings.bucket = url.host;
  require_bucket(settings.bucket);
  if (url.port != 0 || !url.query.empty())
    throw Error(ErrorCode::invalid_argument,
                url.scheme + ":// URL: it has a port or a query, and names a bucket and a key");
  settings.prefix = without_slashes(url.path);
  settings.prefix.erase(0, settings.prefix.find_first_not_of('/'));
  if (url.scheme == "r2" || url.scheme == "weka") {
    const bool is_r2 = url.scheme == "r2";
    settings.endpoint =
        needed_endpoint(is_r2 ? "R2_ENDPOINT_URL" : "WEKA_ENDPOINT_URL", url.scheme);
    settings.profile = variable(is_r2 ? "R2_PROFILE" : "WEKA_PROFILE");
    settings.region = is_r2 ? "auto" : "us-east-1";
    settings.is_path_style = true;
  } else if (url.scheme == "gs") {
    settings.endpoint = "https://storage.googleapis.com";
    settings.profile = variable("GS_PROFILE");
    settings.region = "auto";
    settings.is_path_style = settings.is_google = true;
  } else {
    settle_s3(settings);
  }
  settings.endpoint = without_slashes(settings.endpoint);
  const std::string style = variable("TESSERA_S3_STYLE");
  if (!style.empty()) settings.is_path_style = style != "host";
  return settings;
}

}  // namespace tessera::s3
