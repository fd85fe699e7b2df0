// Links of an answer's header (RFC 8288).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct WebLink {
  std::string target;                       // as it was written, mostly relative to what was asked
  std::vector<std::string> relations = {};  // "next", in lower case
};

// Of a Link header, or of several that are joined by commas, in their order. Other parameters than
// `rel` are passed over. Throws `corrupt` for what is no list of links.
[[nodiscard]] std::vector<WebLink> links_in(std::string_view header);

}  // namespace tessera
