// What S3 servers say in XML. A document that is cut, lies, nests or has a document type is
// `corrupt`, one above 16 MiB `limit`, and elements that nobody asked for are skipped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::s3 {

// What a good answer is, by its root element.
enum class Document : std::uint8_t { listing, uploads, parts, upload, copied, completed };
// Whether `xml` begins and ends as such a document: a page of a proxy and one that was cut do not.
[[nodiscard]] bool is_whole(std::string_view xml, Document document);
// The object that an `upload` or `completed` is about; empty: it does not say. Throws `corrupt`.
[[nodiscard]] std::string parse_key(std::string_view xml, Document document);

// An ETag as requests have it: in quotes, which some servers leave out. "" stays that.
[[nodiscard]] std::string quoted_etag(std::string etag);

struct ListedObject {
  std::string key;
  std::uint64_t size = 0;
  std::string etag;      // with its quotes
  std::string modified;  // 2026-11-25T03:00:00.000Z; empty: unknown
};
struct Listing {
  std::vector<ListedObject> objects;
  std::vector<std::string> prefixes;  // CommonPrefixes
  std::string next;                   // of the next page; empty: this is the last
};
// ListBucketResult of ListObjectsV2 with encoding-type=url. A page that is truncated without a
// token is `corrupt`.
[[nodiscard]] Listing parse_listing(std::string_view xml);

struct ListedUpload {
  std::string key, id;
  std::string initiated;  // 2026-11-25T03:00:00.000Z
};
struct UploadListing {
  std::vector<ListedUpload> uploads;
  std::string next_key, next_id;  // empty: this is the last
};
// A page that is not the last may leave out what the next one begins behind (SeaweedFS does): that
// is its last upload then.
[[nodiscard]] UploadListing parse_uploads(std::string_view xml);

struct ListedPart {
  int number = 0;
  std::uint64_t size = 0;
  std::string etag;
  std::string crc32;     // base64; empty: none
  std::string modified;  // 2026-11-25T03:00:00.000Z; empty: unknown
};
struct PartListing {
  std::vector<ListedPart> parts;
  int next = 0;  // the next page begins behind this number; 0: this is the last
};
// Numbers are from 1 to 10,000: others are `corrupt`.
[[nodiscard]] PartListing parse_parts(std::string_view xml);

[[nodiscard]] std::string parse_upload_id(std::string_view xml);    // of CreateMultipartUpload
[[nodiscard]] std::string parse_copied_etag(std::string_view xml);  // of CopyObject, UploadPartCopy

struct ServerError {
  std::string code;  // "NoSuchKey"; empty: this is no <Error> document
  std::string message, region, request_id;
};
// Never throws: what is no error document has an empty code.
[[nodiscard]] ServerError parse_error(std::string_view xml) noexcept;

struct CompletedPart {
  int number = 0;
  std::string etag;
  std::string crc32;  // base64; empty: none
};
[[nodiscard]] std::string complete_request(const std::vector<CompletedPart>& parts);

}  // namespace tessera::s3
