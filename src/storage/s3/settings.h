// Which server a URL of a bucket means, and how it is spoken to.
#pragma once

#include <string>

#include "storage/http/uri.h"

namespace tessera::s3 {

struct Settings {
  std::string endpoint;  // "https://s3.eu-west-1.amazonaws.com", no slash at the end
  std::string region;    // of the signature: "us-east-1", r2 "auto"
  std::string profile;   // of credentials; empty: the default chain
  std::string bucket;
  std::string prefix;          // of names in the bucket, without slashes at its ends
  bool is_path_style = false;  // https://host/bucket/key, not https://bucket.host/key
  bool is_google = false;      // preconditions are x-goog-if-generation-match
};

// For s3, r2, weka and gs, by the environment: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
// AWS_DEFAULT_REGION, AWS_PROFILE and the profile's `region` and `endpoint_url`; R2_PROFILE and
// R2_ENDPOINT_URL; WEKA_PROFILE and WEKA_ENDPOINT_URL (checkpoint-rows O-09). Named endpoints are
// spoken to in path style unless TESSERA_S3_STYLE=host. Throws `invalid_argument` where a needed
// variable is missing or the bucket's name cannot be one.
[[nodiscard]] Settings settings_for(const Uri& url);

}  // namespace tessera::s3
