#include "storage/s3/settings.h"

#include <algorithm>
#include <initializer_list>

#include "base/text.h"
#include "storage/posix/system.h"
#include "storage/s3/credentials.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

[[noreturn]] void refuse_setting(const std::string& why) {
  throw Error(ErrorCode::invalid_argument, why);
}

struct Variable {
  std::string name, value;
};

// The first that is set; "" if none is.
Variable first_of(std::initializer_list<const char*> names) {
  for (const char* const name : names)
    if (std::string value = variable(name); !value.empty()) return {name, std::move(value)};
  return {};
}

bool is_small_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}
bool is_plain(char c) {
  return is_small_or_digit(c) || (c >= 'A' && c <= 'Z');
}

void require_bucket(const std::string& name) {
  // Old buckets and those of other servers have names that new ones of AWS may not have.
  const bool is_good =
      !name.empty() && name.size() < 256 && is_plain(name.front()) && is_plain(name.back()) &&
      std::ranges::all_of(name, [](char c) { return is_plain(c) || is_one_of(c, '.', '-', '_'); });
  if (!is_good) refuse_setting("'" + name.substr(0, 80) + "' cannot be a bucket's name");
}

// Without dots: the certificate of a host name has one more label, not two.
bool is_label_of_host(const std::string& bucket) {
  return bucket.size() <= 63 &&
         std::ranges::all_of(bucket, [](char c) { return is_small_or_digit(c) || c == '-'; });
}

std::string prefix_of(const Uri& url) {
  std::string prefix = url.path.substr(url.path.starts_with('/') ? 1 : 0);
  if (prefix.empty()) return prefix;
  if (prefix.ends_with('/')) prefix.pop_back();
  for (std::size_t begin = 0; begin <= prefix.size();) {
    const std::size_t end = std::min(prefix.find('/', begin), prefix.size());
    const std::string part = prefix.substr(begin, end - begin);
    if (is_one_of(part, "", ".", ".."))
      refuse_setting(url.scheme + "://" + url.host + ": a part of the key is empty or dots");
    begin = end + 1;
  }
  return prefix;
}

// `from`: what it is set by.
std::string endpoint_of(const std::string& text, const std::string& from) {
  Uri uri;
  try {
    uri = parse_uri(text);
  } catch (const Error& error) {
    refuse_setting(from + ": " + error.message());
  }
  if (!is_one_of(uri.scheme, "http", "https") || !uri.query.empty())
    refuse_setting(from + " is no URL of a server: it begins with https:// and has no query");
  return without_slashes(to_string(uri));
}

// OLMo's schemes name their endpoint and profile by variables of their own (checkpoint-rows O-07).
std::string needed_endpoint(const char* name, const std::string& scheme) {
  const std::string value = variable(name);
  if (value.empty()) refuse_setting(scheme + ":// needs " + name + ", the URL of the server");
  return endpoint_of(value, name);
}

// The endpoint in "[services NAME]", which a profile names.
Variable endpoint_of_services(const std::string& name) {
  if (name.empty()) return {};
  return {"endpoint_url of s3 in the services '" + name + "'",
          profile_setting(services_section(name), "s3.endpoint_url").value_or("")};
}

// What would name another server, or who vouches for it, is not passed over: it is refused.
void require_no_other_server(const Variable& given, const std::string& instead) {
  if (!given.value.empty()) refuse_setting(given.name + " is not heeded here: " + instead);
}

void settle_s3(Settings& settings) {
  settings.profile = first_of({"S3_PROFILE", "AWS_PROFILE"}).value;
  const std::string profile = settings.profile.empty() ? "default" : settings.profile;
  const auto of_profile = [&](const char* name) {
    return Variable{std::string(name) + " of the profile '" + profile + "'",
                    profile_setting(profile, name).value_or("")};
  };
  Variable region = first_of({"AWS_REGION", "AWS_DEFAULT_REGION"});
  if (region.value.empty()) region = of_profile("region");
  if (region.value.empty()) region.value = "us-east-1";
  if (!is_region(region.value)) refuse_setting(region.name + " is no name of a region");
  settings.region = region.value;
  Variable endpoint = first_of({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  if (endpoint.value.empty()) endpoint = endpoint_of_services(of_profile("services").value);
  if (endpoint.value.empty()) endpoint = of_profile("endpoint_url");
  if (first_of({"TESSERA_CA_FILE", "AWS_CA_BUNDLE"}).value.empty())
    require_no_other_server(of_profile("ca_bundle"), "name the file by AWS_CA_BUNDLE");
  for (const char* const name : {"AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"}) {
    const bool is_set = is_one_of(variable(name), "true", "TRUE", "True") && endpoint.value.empty();
    require_no_other_server({name, is_set ? "true" : ""}, "name the server by AWS_ENDPOINT_URL_S3");
  }
  if (!endpoint.value.empty()) {
    settings.endpoint = endpoint_of(endpoint.value, endpoint.name);
    settings.is_path_style = true;
    return;
  }
  settings.endpoint = "https://" + aws_host("s3", settings.region);
  settings.is_path_style = !is_label_of_host(settings.bucket);
}

}  // namespace

bool is_region(std::string_view name) {
  return !name.empty() && name.size() <= 63 && name.front() != '-' && name.back() != '-' &&
         std::ranges::all_of(name, [](char c) { return is_small_or_digit(c) || c == '-'; });
}

std::string aws_host(const std::string& service, const std::string& region) {
  const std::string host = service + "." + region + ".amazonaws.com";
  return region.starts_with("cn-") ? host + ".cn" : host;
}

Settings settings_for(const Uri& url) {
  Settings settings;
  settings.bucket = url.host;
  require_bucket(settings.bucket);
  if (url.port != 0)
    refuse_setting(url.scheme + ":// URL: it has a port, and names a bucket and a key");
  settings.prefix = prefix_of(url);
  settings.ca_file = variable("AWS_CA_BUNDLE");
  if (is_one_of(url.scheme, "r2", "weka")) {
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
  const std::string style = variable("TESSERA_S3_STYLE");
  if (!is_one_of(style, "", "host", "path"))
    refuse_setting("TESSERA_S3_STYLE is neither host nor path");
  if (!style.empty()) settings.is_path_style = style != "host";
  return settings;
}

}  // namespace tessera::s3
