#include "storage/s3/xml.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "conformance/errors.h"

namespace tessera::s3 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string golden(const std::string& name) {
  std::ifstream file(TESSERA_TEST_DATA "/golden/s3_xml/" + name + ".xml", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> keys_of(const Listing& listing) {
  std::vector<std::string> keys;
  for (const ListedObject& object : listing.objects) keys.push_back(object.key);
  return keys;
}

std::string page_of(const std::string& content) {
  return "<ListBucketResult>" + content + "</ListBucketResult>";
}
std::string object(const std::string& key, const std::string& size) {
  return "<Contents><Key>" + key + "</Key>" + size + "</Contents>";
}
// One that is good, with `more` beside it.
std::string good_page(const std::string& more = {}) {
  return page_of(object("a", "<Size>1</Size>") + more);
}

// tests/golden/make/s3_xml.py: each server says it in its own way.
class RealServers : public testing::TestWithParam<std::string> {
 protected:
  static std::string said(const std::string& name) { return golden(GetParam() + "-" + name); }
};
INSTANTIATE_TEST_SUITE_P(All, RealServers, testing::Values("seaweedfs", "moto"));

TEST_P(RealServers, ListObjects) {
  const Listing listing = parse_listing(said("listing"));
  EXPECT_THAT(keys_of(listing), ElementsAre("a b", "a+b", "dir/one", "dir/two", "odd%25&<'\">", "z",
                                            "\u00fc/\u65e5\u672c"));
  for (const ListedObject& one : listing.objects) EXPECT_EQ(one.size, one.key.size()) << one.key;
  EXPECT_EQ(listing.objects[0].etag, "\"0cc9cd4dd26c5137b675a0d819cb9ab0\"");
  EXPECT_THAT(listing.prefixes, ElementsAre());
  EXPECT_EQ(listing.next, "");
}

TEST_P(RealServers, ListPagesAndLevels) {
  const Listing page = parse_listing(said("page"));
  EXPECT_THAT(keys_of(page), ElementsAre("a b", "a+b", "dir/one"));
  EXPECT_NE(page.next, "");
  const Listing level = parse_listing(said("level"));
  EXPECT_THAT(keys_of(level), ElementsAre("a b", "a+b", "odd%25&<'\">", "z"));
  EXPECT_THAT(level.prefixes, ElementsAre("dir/", "\u00fc/"));
  EXPECT_THAT(parse_listing(said("empty")).objects, ElementsAre());
}

TEST_P(RealServers, ListUploads) {
  const std::string id = parse_upload_id(said("upload"));
  const UploadListing all = parse_uploads(said("uploads"));
  ASSERT_EQ(all.uploads.size(), 2U);
  EXPECT_TRUE(id == all.uploads[0].id || id == all.uploads[1].id);
  EXPECT_EQ(all.uploads[0].key, "copy of it");
  EXPECT_THAT(all.uploads[0].initiated, testing::MatchesRegex("20..-..-..T..:..:.*Z"));
  EXPECT_EQ(all.next_key, "");
  EXPECT_EQ(all.next_id, "");
}

TEST_P(RealServers, ListParts_O26) {
  const PartListing all = parse_parts(said("parts"));
  ASSERT_EQ(all.parts.size(), 2U);
  EXPECT_EQ(all.parts[0].number, 1);
  EXPECT_EQ(all.parts[0].size, 1U);
  EXPECT_EQ(all.parts[1].number, 10'000);
  EXPECT_EQ(all.parts[1].etag, "\"ea82410c7a9991816b5eeeebe195e20a\"");
  EXPECT_THAT(all.parts[1].modified, testing::MatchesRegex("20..-..-..T..:..:.*Z"));
  EXPECT_EQ(all.next, 0);
  EXPECT_EQ(parse_parts(said("parts_page")).next, 1);
}

TEST_P(RealServers, TellWhatTheyCopied) {
  for (const char* name : {"copied", "copied_part"})
    EXPECT_THAT(parse_copied_etag(said(name)), HasSubstr("fbade9e36a3f36d3d676c1b808451dd7"));
}

TEST_P(RealServers, TellErrors) {
  const ServerError no_key = parse_error(said("no_key"));
  EXPECT_EQ(no_key.code, "NoSuchKey");
  EXPECT_EQ(no_key.message, "The specified key does not exist.");
  EXPECT_NE(no_key.request_id, "");
  EXPECT_EQ(parse_error(said("no_upload")).code, "NoSuchUpload");
  EXPECT_EQ(parse_error(said("listing")).code, "");
}

TEST(S3Xml, APageOfUploadsEndsWithItsLastOne) {
  const UploadListing page = parse_uploads(golden("seaweedfs-uploads_page"));
  ASSERT_EQ(page.uploads.size(), 1U);
  EXPECT_EQ(page.next_key, "copy of it");
  EXPECT_EQ(page.next_id, page.uploads[0].id);
  const std::string upload = "<Upload><Key>a</Key><UploadId>1</UploadId></Upload>";
  const auto next = [&](const std::string& more) {
    return parse_uploads("<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>" + upload +
                         more + "</ListMultipartUploadsResult>");
  };
  EXPECT_EQ(next("<NextKeyMarker>k</NextKeyMarker>").next_key, "k");
  EXPECT_EQ(next("<NextUploadIdMarker>7</NextUploadIdMarker>").next_id, "7");
  EXPECT_EQ(next("").next_id, "1");
}

TEST(S3Xml, AThousandObjects) {
  std::string content;
  for (int i = 0; i < 2500; ++i)
    content += object("k" + std::to_string(i), "<Size>" + std::to_string(i) + "</Size>");
  const Listing listing = parse_listing(page_of(content));
  ASSERT_EQ(listing.objects.size(), 2500U);
  EXPECT_EQ(listing.objects[2499].key, "k2499");
  EXPECT_EQ(listing.objects[2499].size, 2499U);
}

TEST(S3Xml, TextsAreWhole) {
  const auto key = [](const std::string& text) {
    return parse_listing(page_of(object(text, "<Size>1</Size>"))).objects.at(0).key;
  };
  EXPECT_EQ(key("a<!-- c -->b<![CDATA[&<c>]]>d"), "ab&<c>d");
  EXPECT_EQ(key("a%41+"), "a%41+");  // it does not say that it encodes
  EXPECT_EQ(key("&#x41;&#66;&lt;"), "AB<");
}

struct Hostile {
  const char* name;
  std::string xml;
  const char* why;
};

std::vector<Hostile> hostile_listings() {
  const std::string encoded = "<EncodingType>url</EncodingType>";
  std::string deep;
  for (int i = 0; i < 100; ++i) deep += "<x>";
  for (int i = 0; i < 100; ++i) deep += "</x>";
  std::string laughs = "<!DOCTYPE lolz [<!ENTITY l0 \"lol\">";
  for (int i = 1; i < 10; ++i) {
    laughs += "<!ENTITY l" + std::to_string(i) + " \"";
    for (int n = 0; n < 10; ++n) laughs += "&l" + std::to_string(i - 1) + ";";
    laughs += "\">";
  }
  const std::string one = "<Size>1</Size>";
  return {
      {"no token", good_page("<IsTruncated>true</IsTruncated>"), "no <NextContinuationToken>"},
      {"an empty token", good_page("<IsTruncated>true</IsTruncated><NextContinuationToken/>"),
       "no <NextContinuationToken>"},
      {"perhaps truncated", good_page("<IsTruncated>perhaps</IsTruncated>"), "neither true"},
      {"negative", page_of(object("a", "<Size>-1</Size>")), "no size"},
      {"overflow", page_of(object("a", "<Size>99999999999999999999</Size>")), "no size"},
      {"huge", page_of(object("a", "<Size>9223372036854775807</Size>")), "no size"},
      {"no number", page_of(object("a", "<Size>0x10</Size>")), "no size"},
      {"no size", page_of(object("a", "")), "no <Size>"},
      {"two sizes", page_of(object("a", "<Size>1</Size><Size>2</Size>")), "two <Size>"},
      {"no key", page_of("<Contents>" + one + "</Contents>"), "no <Key>"},
      {"an empty key", page_of(object("", one)), "no <Key>"},
      {"two keys", page_of(object("a</Key><Key>b", one)), "two <Key>"},
      {"an element in a key", page_of(object("a<b/>c", one)), "<b> in the middle"},
      {"half a percent", page_of(encoded + object("a%4", one)), "percent-encoded"},
      {"no hexadecimals", page_of(encoded + object("a%zz", one)), "percent-encoded"},
      {"a reference to NUL", page_of(object("a&#0;b", one)), "a character that there is not"},
      {"a large reference", page_of(object("a&#4294967296;b", one)), "a character"},
      {"a surrogate", page_of(object("a&#xD800;b", one)), "a character"},
      {"a NUL", page_of(object(std::string("a\0b", 3), one)), "NUL"},
      {"another root", "<ListAllMyBucketsResult/>", "instead of <ListBucketResult>"},
      {"an error", "<Error><Code>SlowDown</Code></Error>", "<Error> instead"},
      {"two roots", good_page() + good_page(), "more than an element"},
      {"cut", good_page().substr(0, 40), ""},
      {"deep", good_page(deep), "nests"},
      {"a document type", "<!DOCTYPE a>" + good_page(), "more than an element"},
      {"a billion laughs", laughs + "]>" + page_of(object("&l9;", one)), "more than an element"},
      {"a web page", "<!DOCTYPE html><html><body><p>Sign in<br></body></html>", ""},
      {"text", "Bad Gateway", ""},
      {"nothing", "", ""},
  };
}

TEST(S3Xml, ListingsThatLieAreCorrupt) {
  EXPECT_EQ(parse_listing(good_page()).objects.size(), 1U);  // the rest of each is good
  for (const auto& [name, xml, why] : hostile_listings()) {
    const Error error = error_of([&xml = xml] { (void)parse_listing(xml); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt) << name;
    EXPECT_THAT(error.message(), HasSubstr(why)) << name;
    EXPECT_LT(error.message().size(), 200U) << name;
    EXPECT_EQ(code_of([&xml = xml] { (void)parse_uploads(xml); }), ErrorCode::corrupt) << name;
    EXPECT_EQ(code_of([&xml = xml] { (void)parse_parts(xml); }), ErrorCode::corrupt) << name;
    EXPECT_EQ(code_of([&xml = xml] { (void)parse_upload_id(xml); }), ErrorCode::corrupt) << name;
    EXPECT_EQ(code_of([&xml = xml] { (void)parse_copied_etag(xml); }), ErrorCode::corrupt) << name;
    EXPECT_EQ(parse_error(xml).code, std::string(name) == "an error" ? "SlowDown" : "") << name;
  }
}

TEST(S3Xml, UploadsThatLieAreCorrupt) {
  for (const char* content : {"<IsTruncated>true</IsTruncated>", "<Upload><Key>a</Key></Upload>",
                              "<Upload><UploadId>1</UploadId></Upload>"}) {
    const std::string xml =
        "<ListMultipartUploadsResult>" + std::string(content) + "</ListMultipartUploadsResult>";
    EXPECT_EQ(code_of([&] { (void)parse_uploads(xml); }), ErrorCode::corrupt) << content;
  }
}

std::string parts_page(const std::string& content, const std::string& root = "ListPartsResult") {
  return "<" + root + ">" + content + "</" + root + ">";
}
std::string part(const std::string& number, const std::string& more = "<Size>5</Size>") {
  return "<Part><PartNumber>" + number + "</PartNumber>" + more + "</Part>";
}

TEST(S3Xml, Parts_O26) {
  const std::string rest =
      "<ETag>&#34;e&#34;</ETag><LastModified>2026-11-25T11:13:01Z</LastModified>"
      "<ChecksumCRC32>AAAAAA==</ChecksumCRC32>";
  // The second root is moto's.
  for (const char* root : {"ListPartsResult", "ListPartsResponse"}) {
    const PartListing all =
        parse_parts(parts_page(part("1") + part("10000", "<Size>64</Size>" + rest), root));
    ASSERT_EQ(all.parts.size(), 2U);
    EXPECT_EQ(all.parts[0].size, 5U);
    EXPECT_EQ(all.parts[1].number, 10'000);
    EXPECT_EQ(all.parts[1].etag, "\"e\"");
    EXPECT_EQ(all.parts[1].crc32, "AAAAAA==");
    EXPECT_EQ(all.parts[1].modified, "2026-11-25T11:13:01Z");
    EXPECT_EQ(all.next, 0);
  }
  const std::string truncated = "<IsTruncated>true</IsTruncated>";
  EXPECT_EQ(parse_parts(parts_page(truncated + part("7"))).next, 7);
  EXPECT_EQ(parse_parts(parts_page(truncated + part("7") +
                                   "<NextPartNumberMarker>9</NextPartNumberMarker>"))
                .next,
            9);
}

TEST(S3Xml, PartsThatLieAreCorrupt_O26) {
  for (const std::string& content :
       {std::string("<IsTruncated>true</IsTruncated>"), part("0"), part("10001"), part("-1"),
        part("99999999999999999999"), part("x"), part(""), part("1", ""),
        part("1", "<Size>-1</Size>"), part("1", "<Size>1</Size><Size>1</Size>"),
        part("1</PartNumber><PartNumber>2"),
        "<IsTruncated>true</IsTruncated>" + part("1") +
            "<NextPartNumberMarker>10001</NextPartNumberMarker>"}) {
    EXPECT_EQ(code_of([&] { (void)parse_parts(parts_page(content)); }), ErrorCode::corrupt)
        << content;
  }
}

TEST(S3Xml, LongDocumentsAreNotRead) {
  const std::string xml = good_page("<x>" + std::string(16U << 20U, 'x') + "</x>");
  EXPECT_EQ(code_of([&] { (void)parse_listing(xml); }), ErrorCode::limit);
  EXPECT_EQ(parse_error(xml).code, "");
}

TEST(S3Xml, WhatWasUploadedIsSaidInXml) {
  EXPECT_EQ(complete_request({{1, "\"a\"", "AAAAAA=="}, {20, "<&", ""}}),
            "<CompleteMultipartUpload>"
            "<Part><PartNumber>1</PartNumber><ETag>&quot;a&quot;</ETag>"
            "<ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part>"
            "<Part><PartNumber>20</PartNumber><ETag>&lt;&amp;</ETag></Part>"
            "</CompleteMultipartUpload>");
}

}  // namespace
}  // namespace tessera::s3
