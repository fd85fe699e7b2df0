// Which server a URL of a bucket means, and how it is spoken to.
#pragma once

#include <string>
#include <string_view>

#include "storage/http/uri.h"

namespace tessera::s3 {

struct Settings {
  std::string endpoint;      // "https://s3.eu-west-1.amazonaws.com", no slash at the end
  std::string region;        // of the signature: "us-east-1", r2 "auto"
  std::string profile = {};  // of credentials; empty: the default chain
  std::string bucket;
  std::string prefix = {};     // of names in the bucket, without slashes at its ends
  bool is_path_style = false;  // https://host/bucket/key, not https://bucket.host/key
  bool is_google = false;      // preconditions are x-goog-if-generation-match
  std::string ca_file = {};    // AWS_CA_BUNDLE

  [[nodiscard]] bool operator==(const Settings&) const = default;
};

// For s3, r2, weka and gs (parse_bucket_uri), by the environment: AWS_ENDPOINT_URL_S3,
// AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, S3_PROFILE, AWS_PROFILE and the profile's
// `services`, `region` and `endpoint_url`; AWS_CA_BUNDLE; R2_PROFILE and R2_ENDPOINT_URL;
// WEKA_PROFILE and WEKA_ENDPOINT_URL; GS_PROFILE. Named endpoints are spoken to in path style
// unless TESSERA_S3_STYLE=host. Throws `invalid_argument` where a needed variable is missing or has
// no use, the bucket's name cannot be one, or a part of the key is empty,
// "." or "..", which servers and proxies take for other keys.
[[nodiscard]] Settings settings_for(const Uri& url);

// Whether a server may have a region of that name, which becomes a part of host names.
[[nodiscard]] bool is_region(std::string_view name);
// "s3.eu-west-1.amazonaws.com". `region`: is_region().
[[nodiscard]] std::string aws_host(const std::string& service, const std::string& region);

}  // namespace tessera::s3
