#include "storage/s3/xml.h"

#include <charconv>
#include <optional>
#include <pugixml.hpp>

#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr int kMostDepth = 32;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::corrupt, "the server's XML: " + why);
}

// No document type and no entities of one: pugixml skips both.
pugi::xml_document parse(std::string_view xml, const char* root) {
  pugi::xml_document document;
  if (xml.find('\0') != std::string_view::npos) refuse("it has a NUL byte");
  const auto result =
      document.load_buffer(xml.data(), xml.size(), pugi::parse_default, pugi::encoding_utf8);
  if (!result) refuse(result.description());
  const std::string_view name = document.document_element().name();
  if (name != root) refuse("<" + std::string(name.substr(0, 100)) + "> instead of <" + root + ">");
  return document;
}

int depth_below(const pugi::xml_node& top) {
  struct Walker : pugi::xml_tree_walker {
    int deepest = 0;
    bool for_each(pugi::xml_node&) override {
      deepest = std::max(deepest, depth());
      return deepest <= kMostDepth;
    }
  } walker;
  pugi::xml_node node = top;
  node.traverse(walker);
  return walker.deepest;
}

void require_shallow(const pugi::xml_document& document) {
  if (depth_below(document) > kMostDepth) refuse("it nests too deep");
}

// The text of the one child of that name; none: there is none.
std::optional<std::string> child(const pugi::xml_node& node, const char* name) {
  const pugi::xml_node found = node.child(name);
  if (!found) return std::nullopt;
  if (found.next_sibling(name)) refuse("two <" + std::string(name) + "> in one place");
  return found.text().get();
}

std::string needed(const pugi::xml_node& node, const char* name) {
  auto text = child(node, name);
  if (!text || text->empty()) refuse("no <" + std::string(name) + ">");
  return *std::move(text);
}

std::string decoded(const std::string& text) {
  // "+" is a blank in this encoding, and a plus is "%2B".
  std::string spaced = text;
  for (char& c : spaced)
    if (c == '+') c = ' ';
  try {
    return percent_decoded(spaced);
  } catch (const Error& error) {
    refuse(error.message());
  }
}

std::uint64_t number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > (1ULL << 62U))
    refuse("'" + text.substr(0, 40) + "' is no size");
  return value;
}

bool is_truncated(const pugi::xml_node& root) {
  return child(root, "IsTruncated").value_or("false") == "true";
}

}  // namespace

Listing parse_listing(std::string_view xml) {
  const pugi::xml_document document = parse(xml, "ListBucketResult");
  require_shallow(document);
  const pugi::xml_node root = document.document_element();
  const bool is_encoded = child(root, "EncodingType").value_or("") == "url";
  const auto name = [is_encoded](const std::string& text) {
    return is_encoded ? decoded(text) : text;
  };
  Listing listing;
  for (const pugi::xml_node& node : root.children("Contents")) {
    listing.objects.push_back({name(needed(node, "Key")), number(needed(node, "Size")),
                               child(node, "ETag").value_or("")});
  }
  for (const pugi::xml_node& node : root.children("CommonPrefixes"))
    listing.prefixes.push_back(name(needed(node, "Prefix")));
  if (is_truncated(root)) listing.next = needed(root, "NextContinuationToken");
  return listing;
}

UploadListing parse_uploads(std::string_view xml) {
  const pugi::xml_document document = parse(xml, "ListMultipartUploadsResult");
  require_shallow(document);
  const pugi::xml_node root = document.document_element();
  const bool is_encoded = child(root, "EncodingType").value_or("") == "url";
  const auto name = [is_encoded](const std::string& text) {
    return is_encoded ? decoded(text) : text;
  };
  UploadListing listing;
  for (const pugi::xml_node& node : root.children("Upload")) {
    listing.uploads.push_back({name(needed(node, "Key")), needed(node, "UploadId"),
                               child(node, "Initiated").value_or("")});
  }
  if (!is_truncated(root)) return listing;
  listing.next_key = name(needed(root, "NextKeyMarker"));
  listing.next_id = needed(root, "NextUploadIdMarker");
  return listing;
}

std::string parse_upload_id(std::string_view xml) {
  const pugi::xml_document document = parse(xml, "InitiateMultipartUploadResult");
  return needed(document.document_element(), "UploadId");
}

std::string parse_copied_etag(std::string_view xml) {
  const bool is_part = xml.find("<CopyPartResult") != std::string_view::npos;
  const pugi::xml_document document = parse(xml, is_part ? "CopyPartResult" : "CopyObjectResult");
  return needed(document.document_element(), "ETag");
}

ServerError parse_error(std::string_view xml) noexcept {
  try {
    const pugi::xml_document document = parse(xml, "Error");
    const pugi::xml_node root = document.document_element();
    return {child(root, "Code").value_or(""), child(root, "Message").value_or(""),
            child(root, "Region").value_or(""), child(root, "RequestId").value_or("")};
  } catch (const std::exception&) {
    return {};
  }
}

std::string complete_request(const std::vector<CompletedPart>& parts) {
  // ETags and base64 have nothing that XML would need escaped but the ETag's quotes.
  std::string xml = "<CompleteMultipartUpload>";
  for (const CompletedPart& part : parts) {
    std::string etag;
    for (const char c : part.etag) etag += c == '"' ? std::string("&quot;") : std::string(1, c);
    xml += "<Part><PartNumber>" + std::to_string(part.number) + "</PartNumber><ETag>" + etag +
           "</ETag>";
    if (!part.crc32.empty()) xml += "<ChecksumCRC32>" + part.crc32 + "</ChecksumCRC32>";
    xml += "</Part>";
  }
  return xml + "</CompleteMultipartUpload>";
}

}  // namespace tessera::s3
