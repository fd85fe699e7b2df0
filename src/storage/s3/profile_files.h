// AWS's files of profiles.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace tessera::s3 {

using Profile = std::map<std::string, std::string>;

// What a section may be called: in ~/.aws/config "[profile x]", in ~/.aws/credentials "[x]".
enum class SectionsAre { of_config, names };

// "[name]" and "name = value" lines, as Python's configparser and so AWS's own tools read them: a
// line that is indented deeper than the setting above belongs to that one, and is left out, as are
// comments and sections of other kinds. Of "[services x]" it is kept, as "s3.endpoint_url" of a
// profile services_section("x"). Names of settings are in lower case.
[[nodiscard]] std::map<std::string, Profile> parse_profiles(const std::string& text,
                                                            SectionsAre sections);
[[nodiscard]] std::string services_section(const std::string& name);
// Of ~/.aws/config and ~/.aws/credentials together, where the second has precedence; none: neither
// has it. A file that is not there has no profiles; one that cannot be read is `io`.
[[nodiscard]] std::optional<Profile> read_profile(const std::string& name);

// A file of at most 1 MiB, whole. Throws `not_found`, `io` or `limit`.
[[nodiscard]] std::string read_small_file(const std::string& path);
[[nodiscard]] std::string without_line_end(std::string text);
[[nodiscard]] std::string variable(const char* name);  // of the environment; "": not set

}  // namespace tessera::s3
