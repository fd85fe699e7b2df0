// AWS's files of profiles.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace tessera::s3 {

using Profile = std::map<std::string, std::string>;

// "[name]" and "name = value" lines; what is indented belongs to the setting above it, and is left
// out, as are comments.
[[nodiscard]] std::map<std::string, Profile> parse_profiles(const std::string& text);
// Of ~/.aws/config and ~/.aws/credentials together, where the second has precedence; none: neither
// has it. A file that is not there has no profiles; one that cannot be read is `io`.
[[nodiscard]] std::optional<Profile> read_profile(const std::string& name);

// A file of at most 1 MiB, whole. Throws `not_found`, `io` or `limit`.
[[nodiscard]] std::string read_small_file(const std::string& path);
[[nodiscard]] std::string variable(const char* name);  // of the environment; "": not set

}  // namespace tessera::s3
