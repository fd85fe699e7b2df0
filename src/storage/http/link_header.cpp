#include "storage/http/link_header.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kBlanks = " \t";

// Each member takes what it reads.
class LinkReader {
 public:
  explicit LinkReader(std::string_view header) : rest_(header) {}

  std::vector<WebLink> links() {
    std::vector<WebLink> found;
    while (skip_separators(',')) found.push_back(link());
    return found;
  }

 private:
  [[noreturn]] static void refuse_link(const char* why) {
    throw Error(ErrorCode::corrupt, std::string("the answer has a Link header with ") + why);
  }

  void skip_blanks() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(kBlanks), rest_.size()));
  }
  // Elements of lists may be empty. False: nothing is left.
  bool skip_separators(char separator) {
    skip_blanks();
    while (rest_.starts_with(separator)) {
      rest_.remove_prefix(1);
      skip_blanks();
    }
    return !rest_.empty();
  }

  // Up to one of `ends`, or to all of it.
  std::string_view up_to(std::string_view ends) {
    const std::string_view text = rest_.substr(0, rest_.find_first_of(ends));
    rest_.remove_prefix(text.size());
    return text;
  }

  WebLink link() {
    if (!rest_.starts_with('<')) refuse_link("something that is no link");
    rest_.remove_prefix(1);
    WebLink link{.target = std::string(up_to(">"))};
    if (rest_.empty()) refuse_link("an address without an end");
    rest_.remove_prefix(1);
    bool has_relations = false;  // the first `rel` counts
    for (skip_blanks(); rest_.starts_with(';'); skip_blanks()) {
      if (!skip_separators(';') || rest_.starts_with(',')) break;
      const std::string name = lowered(up_to(" \t=;,"));
      if (name.empty()) refuse_link("a parameter without a name");
      const std::string value = parameter_value();
      if (name == "rel" && !std::exchange(has_relations, true)) link.relations = words_of(value);
    }
    if (!rest_.empty() && !rest_.starts_with(',')) refuse_link("something behind a link");
    return link;
  }

  std::string parameter_value() {
    skip_blanks();
    if (!rest_.starts_with('=')) return {};
    rest_.remove_prefix(1);
    skip_blanks();
    return rest_.starts_with('"') ? quoted() : std::string(up_to(" \t;,"));
  }

  std::string quoted() {
    std::string text;
    for (std::size_t at = 1; at < rest_.size(); ++at) {
      if (rest_[at] == '"') {
        rest_.remove_prefix(at + 1);
        return text;
      }
      if (rest_[at] == '\\') ++at;
      if (at < rest_.size()) text += rest_[at];
    }
    refuse_link("a quotation without an end");
  }

  static std::vector<std::string> words_of(const std::string& text) {
    LinkReader reader(text);
    std::vector<std::string> words;
    for (reader.skip_blanks(); !reader.rest_.empty(); reader.skip_blanks())
      words.push_back(lowered(reader.up_to(kBlanks)));
    return words;
  }

  std::string_view rest_;
};

}  // namespace

std::vector<WebLink> links_in(std::string_view header) {
  return LinkReader(header).links();
}

}  // namespace tessera
