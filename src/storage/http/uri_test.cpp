#include "storage/http/uri.h"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera {
namespace {

TEST(Uri, IsTakenApart) {
  const Uri uri = parse_uri("HTTPS://Host.example:8443/a%20b/c@1?x=1&y=/?");
  EXPECT_EQ(uri.scheme, "https");
  EXPECT_EQ(uri.host, "Host.example");
  EXPECT_EQ(uri.port, 8443);
  EXPECT_EQ(uri.path, "/a%20b/c@1");
  EXPECT_EQ(uri.query, "x=1&y=/?");
  EXPECT_EQ(to_string(uri), "https://Host.example:8443/a%20b/c@1?x=1&y=/?");
}

TEST(Uri, WhatIsLeftOutIsEmpty) {
  const Uri bucket = parse_uri("s3://bucket");
  EXPECT_EQ(bucket.host, "bucket");
  EXPECT_EQ(bucket.port, 0);
  EXPECT_EQ(bucket.path + bucket.query, "");
  EXPECT_EQ(parse_uri("s3://bucket?versions").query, "versions");
  EXPECT_EQ(parse_uri("file:///a/b").path, "/a/b");
  EXPECT_EQ(parse_uri("http://[::1]:80/").host, "[::1]");
  EXPECT_EQ(parse_uri("http://[::1]").port, 0);
}

TEST(Uri, KeysOfABucketAreAsTheyAre) {
  const Uri uri = parse_bucket_uri("s3://bucket/a?b#c%23/d");
  EXPECT_EQ(uri.host, "bucket");
  EXPECT_EQ(uri.path, "/a?b#c%23/d");
  EXPECT_EQ(uri.query, "");
  EXPECT_EQ(parse_bucket_uri("s3://bucket").path, "");
  for (const char* text : {"s3://bucket?versions", "s3://bucket#x", "s3:///key", "s3://b/a\nb"})
    EXPECT_EQ(code_of([&] { (void)parse_bucket_uri(text); }), ErrorCode::invalid_argument) << text;
}

TEST(Uri, AuthorityLeavesUsualPortsOut) {
  EXPECT_EQ(authority_of(parse_uri("http://h:80/")), "h");
  EXPECT_EQ(authority_of(parse_uri("https://h:443/")), "h");
  EXPECT_EQ(authority_of(parse_uri("http://h:443/")), "h:443");
  EXPECT_EQ(authority_of(parse_uri("https://[::1]:9/")), "[::1]:9");
}

TEST(Uri, PathsAreNoUrls) {
  for (const char* path : {"", "/a/b", "a:b", "c:/d", "://a", "1a://b", "a b://c", "./s3://x"})
    EXPECT_FALSE(is_url(path)) << path;
  for (const char* url : {"s3://b", "file:///x", "gs://b/k", "A+1.-://x"})
    EXPECT_TRUE(is_url(url)) << url;
}

TEST(Uri, RefusesWhatItCannotMean) {
  for (const char* text :
       {"/a", "http://", "s3:///key", "http://h:/", "http://h:0/", "http://h:65536/", "http://h:1x",
        "http://h:-1", "http://[::1/", "http://[::1]x/", "http://[zz]/", "http://a b/",
        "http://a%41/", "http://h/#part", "http://h/a\nb", "http://h\\i/"})
    EXPECT_EQ(code_of([&] { (void)parse_uri(text); }), ErrorCode::invalid_argument) << text;
}

TEST(Uri, PasswordsAreRefusedAndNotRepeated) {
  for (const char* text : {"s3://key:hunter2@bucket/x", "http://hunter2@h", "http://u:hunter2@h:x/",
                           "http://h:hunter2@/#", "http://u:hunter2\t@h/"}) {
    const Error error = error_of([&] { (void)parse_uri(text); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_THAT(error.what(), testing::Not(testing::HasSubstr("hunter2"))) << text;
  }
}

TEST(Uri, LoopbackIsThisHostByItsName) {
  for (const char* url : {"http://localhost", "http://localhost:1", "http://127.0.0.1",
                          "http://127.9.8.7:80/", "http://[::1]:8333"})
    EXPECT_TRUE(is_loopback_url(url)) << url;
  for (const char* url : {"http://127.0.0.1.example.com", "http://127.0.0", "http://localhost.de",
                          "http://1270.0.0.1", "http://128.0.0.1", "http://[::2]",
                          "http://127.a.b.c", "http://127...1", "http://127.0.0."})
    EXPECT_FALSE(is_loopback_url(url)) << url;
}

TEST(Uri, ErrorsTellNoQuery) {
  EXPECT_EQ(without_query("https://h/p?sig=1"), "https://h/p");
  EXPECT_EQ(without_query("https://h/p"), "https://h/p");
}

TEST(PercentEncoding, KeepsWhatSigV4Keeps) {
  EXPECT_EQ(percent_encoded("aZ09-._~", false), "aZ09-._~");
  EXPECT_EQ(percent_encoded("a/b c+\xff=*", false), "a%2Fb%20c%2B%FF%3D%2A");
  EXPECT_EQ(percent_encoded("a/b", true), "a/b");
  EXPECT_EQ(percent_decoded("%41%2f%2F+"), "A//+");
}

TEST(Uri, AnErrorMayTellTheServer) {
  for (const char* url : {"https://h:8", "https://h:8/", "https://h:8/a?b", "https://h:8?b://c/"})
    EXPECT_EQ(server_of(url), "https://h:8") << url;
}

// Any bytes come back, and what goes over the wire is plain ASCII.
TEST(PercentEncoding, RoundTripsOfAnyBytes) {
  std::mt19937 random(19);
  for (int round = 0; round < 2000; ++round) {
    std::string text(random() % 40, '\0');
    for (char& c : text) c = static_cast<char>(random());
    for (const bool keeps : {false, true}) {
      const std::string encoded = percent_encoded(text, keeps);
      EXPECT_EQ(percent_decoded(encoded), text);
      EXPECT_EQ(encoded.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                          "0123456789-._~%/"),
                std::string::npos);
      EXPECT_TRUE(keeps || encoded.find('/') == std::string::npos);
    }
  }
}

TEST(PercentEncoding, RefusesHalfAnEscape) {
  for (const char* text : {"%", "a%4", "%4g", "%g4", "%%41", "%-1"})
    EXPECT_EQ(code_of([&] { (void)percent_decoded(text); }), ErrorCode::invalid_argument) << text;
}

}  // namespace
}  // namespace tessera
