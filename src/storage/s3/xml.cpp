#include "storage/s3/xml.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <pugixml.hpp>
#include <span>
#include <utility>

#include "base/text.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr std::size_t kMostBytes = 16U << 20U;
constexpr int kMostDepth = 32;

using Roots = std::span<const std::string_view>;
constexpr std::string_view kErrorRoot[] = {"Error"};

// Servers differ about the names of two.
Roots roots_of(Document document) {
  static constexpr std::string_view kListing[] = {"ListBucketResult"};
  static constexpr std::string_view kUploads[] = {"ListMultipartUploadsResult"};
  static constexpr std::string_view kParts[] = {"ListPartsResult", "ListPartsResponse"};
  static constexpr std::string_view kUpload[] = {"InitiateMultipartUploadResult"};
  static constexpr std::string_view kCopied[] = {"CopyObjectResult", "CopyPartResult"};
  static constexpr std::string_view kCompleted[] = {"CompleteMultipartUploadResult"};
  switch (document) {
    case Document::listing:
      return kListing;
    case Document::uploads:
      return kUploads;
    case Document::parts:
      return kParts;
    case Document::upload:
      return kUpload;
    case Document::copied:
      return kCopied;
    case Document::completed:
      break;
  }
  return kCompleted;
}

constexpr std::string_view kXmlBlanks = " \t\r\n";

// Takes blanks, the declaration and comments away from the begin.
std::string_view without_prolog(std::string_view xml) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  if (xml.starts_with(kMark)) xml.remove_prefix(kMark.size());
  while (true) {
    xml.remove_prefix(std::min(xml.find_first_not_of(kXmlBlanks), xml.size()));
    const std::string_view end = xml.starts_with("<?")     ? "?>"
                                 : xml.starts_with("<!--") ? "-->"
                                                           : "";
    const std::size_t at = end.empty() ? std::string_view::npos : xml.find(end);
    if (at == std::string_view::npos) return xml;
    xml.remove_prefix(at + end.size());
  }
}

// `xml` has no blanks at its ends.
bool is_element(std::string_view xml, std::string_view name) {
  if (!xml.starts_with('<') || !xml.substr(1).starts_with(name) || !xml.ends_with('>'))
    return false;
  const std::string_view rest = xml.substr(1 + name.size());
  if ((kXmlBlanks.find(rest[0]) == std::string_view::npos && !is_one_of(rest[0], '/', '>')))
    return false;
  if (rest.find('>') == rest.size() - 1) return rest.ends_with("/>");
  xml.remove_suffix(1);
  const std::size_t last = xml.find_last_not_of(kXmlBlanks);
  return xml.substr(0, last + 1).ends_with("</" + std::string(name));
}

[[noreturn]] void refuse_xml(const std::string& why) {
  throw Error(ErrorCode::corrupt, "the server's XML: " + why);
}

// pugixml takes what "&#0;" stands for as the end of the text, and numbers above 2^32 for smaller
// ones.
void require_good_references(std::string_view xml) {
  for (std::size_t at = xml.find("&#"); at != std::string_view::npos; at = xml.find("&#", at + 2)) {
    const bool is_hexadecimal = xml.substr(at + 2).starts_with('x');
    const std::string_view digits = xml.substr(at + (is_hexadecimal ? 3 : 2));
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number,
                                              is_hexadecimal ? 16 : 10);
    const bool is_ended = end != digits.data() + digits.size() && *end == ';';
    const bool is_surrogate = number >= 0xD800 && number <= 0xDFFF;
    if (error != std::errc() || !is_ended || number == 0 || number > 0x10FFFF || is_surrogate)
      refuse_xml("a reference to a character that there is not");
  }
}

void require_shallow(pugi::xml_document& document) {
  struct Walker : pugi::xml_tree_walker {
    int deepest = 0;
    bool for_each(pugi::xml_node&) override {
      deepest = std::max(deepest, depth());
      return deepest <= kMostDepth;
    }
  } walker;
  document.traverse(walker);
  if (walker.deepest > kMostDepth) refuse_xml("it nests too deep");
}

// Nothing that a document type could declare is looked at: one that has a type is refused.
pugi::xml_document parse(std::string_view xml, Roots roots) {
  if (xml.size() > kMostBytes)
    throw Error(ErrorCode::limit, "the server's XML: it is longer than 16 MiB");
  if (xml.find('\0') != std::string_view::npos) refuse_xml("it has a NUL byte");
  require_good_references(xml);
  pugi::xml_document document;
  const auto result = document.load_buffer(
      xml.data(), xml.size(), pugi::parse_default | pugi::parse_doctype, pugi::encoding_utf8);
  if (!result) refuse_xml(result.description());
  const pugi::xml_node root = document.document_element();
  if (document.first_child() != root || document.last_child() != root)
    refuse_xml("it has more than an element");
  const std::string_view name = root.name();
  if (std::ranges::find(roots, name) == roots.end()) {
    refuse_xml("<" + std::string(name.substr(0, 100)) + "> instead of <" +
               std::string(roots.front()) + ">");
  }
  require_shallow(document);
  return document;
}

// All of it: comments and sections of CDATA divide what pugixml calls the text.
std::string text_of(const pugi::xml_node& node) {
  std::string text;
  for (const pugi::xml_node& part : node.children()) {
    if (part.type() == pugi::node_element)
      refuse_xml("<" + std::string(part.name()).substr(0, 100) + "> in the middle of a text");
    text += part.value();
  }
  return text;
}

// The text of the one child of that name; none: there is none.
std::optional<std::string> child(const pugi::xml_node& node, const char* name) {
  const pugi::xml_node found = node.child(name);
  if (!found) return std::nullopt;
  if (found.next_sibling(name)) refuse_xml("two <" + std::string(name) + "> in one place");
  return text_of(found);
}

std::string needed(const pugi::xml_node& node, const char* name) {
  auto text = child(node, name);
  if (!text || text->empty()) refuse_xml("no <" + std::string(name) + ">");
  return *std::move(text);
}

std::string decoded(const std::string& text) {
  // "+" is a blank in this encoding, and a plus is "%2B".
  std::string spaced = text;
  for (char& c : spaced)
    if (c == '+') c = ' ';
  try {
    return percent_decoded(spaced);
  } catch (const Error&) {
    refuse_xml("a name that is percent-encoded wrongly");
  }
}

// How a listing writes keys.
class Names {
 public:
  explicit Names(const pugi::xml_node& root)
      : are_encoded_(child(root, "EncodingType").value_or("") == "url") {}
  [[nodiscard]] std::string operator()(const std::string& text) const {
    return are_encoded_ ? decoded(text) : text;
  }

 private:
  bool are_encoded_;
};

std::uint64_t number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > (1ULL << 62U))
    refuse_xml("'" + text.substr(0, 40) + "' is no size");
  return value;
}

int part_number(const std::string& text) {
  const std::uint64_t value = number(text);
  if (value < 1 || value > 10'000)
    refuse_xml("'" + text.substr(0, 40) + "' is no number of a part");
  return static_cast<int>(value);
}

bool is_truncated(const pugi::xml_node& root) {
  const std::string text = child(root, "IsTruncated").value_or("false");
  if (!is_one_of(text, "true", "false")) refuse_xml("<IsTruncated> is neither true nor false");
  return text == "true";
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '"':
        result += "&quot;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

}  // namespace

bool is_whole(std::string_view xml, Document document) {
  xml = without_prolog(xml);
  xml = xml.substr(0, xml.find_last_not_of(kXmlBlanks) + 1);
  return std::ranges::any_of(roots_of(document),
                             [xml](std::string_view root) { return is_element(xml, root); });
}

std::string parse_key(std::string_view xml, Document document) {
  const pugi::xml_document parsed = parse(xml, roots_of(document));
  return child(parsed.document_element(), "Key").value_or("");
}

std::string quoted_etag(std::string etag) {
  if (etag.empty() || etag.ends_with('"')) return etag;
  return '"' + std::move(etag) + '"';
}

Listing parse_listing(std::string_view xml) {
  const pugi::xml_document document = parse(xml, roots_of(Document::listing));
  const pugi::xml_node root = document.document_element();
  const Names name(root);
  Listing listing;
  for (const pugi::xml_node& node : root.children("Contents")) {
    listing.objects.push_back({name(needed(node, "Key")), number(needed(node, "Size")),
                               quoted_etag(child(node, "ETag").value_or("")),
                               child(node, "LastModified").value_or("")});
  }
  for (const pugi::xml_node& node : root.children("CommonPrefixes"))
    listing.prefixes.push_back(name(needed(node, "Prefix")));
  if (is_truncated(root)) listing.next = needed(root, "NextContinuationToken");
  return listing;
}

UploadListing parse_uploads(std::string_view xml) {
  const pugi::xml_document document = parse(xml, roots_of(Document::uploads));
  const pugi::xml_node root = document.document_element();
  const Names name(root);
  UploadListing listing;
  for (const pugi::xml_node& node : root.children("Upload")) {
    listing.uploads.push_back({name(needed(node, "Key")), needed(node, "UploadId"),
                               child(node, "Initiated").value_or("")});
  }
  if (!is_truncated(root)) return listing;
  if (listing.uploads.empty()) refuse_xml("a part of a list that is empty and not the last");
  const ListedUpload& last = listing.uploads.back();
  const auto key = child(root, "NextKeyMarker"), id = child(root, "NextUploadIdMarker");
  listing.next_key = key && !key->empty() ? name(*key) : last.key;
  listing.next_id = id && !id->empty() ? *id : last.id;
  return listing;
}

PartListing parse_parts(std::string_view xml) {
  const pugi::xml_document document = parse(xml, roots_of(Document::parts));
  const pugi::xml_node root = document.document_element();
  PartListing listing;
  for (const pugi::xml_node& node : root.children("Part")) {
    listing.parts.push_back({part_number(needed(node, "PartNumber")), number(needed(node, "Size")),
                             child(node, "ETag").value_or(""),
                             child(node, "ChecksumCRC32").value_or(""),
                             child(node, "LastModified").value_or("")});
  }
  if (!is_truncated(root)) return listing;
  if (listing.parts.empty()) refuse_xml("a part of a list that is empty and not the last");
  const std::string next = child(root, "NextPartNumberMarker").value_or("");
  listing.next = next.empty() ? listing.parts.back().number : part_number(next);
  return listing;
}

std::string parse_upload_id(std::string_view xml) {
  const pugi::xml_document document = parse(xml, roots_of(Document::upload));
  return needed(document.document_element(), "UploadId");
}

std::string parse_copied_etag(std::string_view xml) {
  const pugi::xml_document document = parse(xml, roots_of(Document::copied));
  return needed(document.document_element(), "ETag");
}

ServerError parse_error(std::string_view xml) noexcept {
  try {
    const pugi::xml_document document = parse(xml, kErrorRoot);
    const pugi::xml_node root = document.document_element();
    return {child(root, "Code").value_or(""), child(root, "Message").value_or(""),
            child(root, "Region").value_or(""), child(root, "RequestId").value_or("")};
  } catch (const std::exception&) {
    return {};
  }
}

std::string complete_request(const std::vector<CompletedPart>& parts) {
  std::string xml = "<CompleteMultipartUpload>";
  for (const CompletedPart& part : parts) {
    // The server's own, with quotes.
    xml += "<Part><PartNumber>" + std::to_string(part.number) + "</PartNumber><ETag>" +
           escaped(part.etag) + "</ETag>";
    if (!part.crc32.empty()) xml += "<ChecksumCRC32>" + part.crc32 + "</ChecksumCRC32>";
    xml += "</Part>";
  }
  return xml + "</CompleteMultipartUpload>";
}

}  // namespace tessera::s3
