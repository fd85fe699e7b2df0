#include "storage/s3/sigv4.h"

#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "storage/http/uri.h"

namespace tessera::s3 {
namespace {

// The examples of "Signature Calculations for the Authorization Header" in AWS's reference of S3.
const Credentials kExample{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
const std::string kEmpty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

SigningScope example_scope() {
  // 2013-05-24T00:00:00Z
  return {"us-east-1", "s3", std::chrono::system_clock::from_time_t(1369353600)};
}

std::string signature_of(HttpRequest request, const std::string& payload_hash,
                         const Credentials& credentials = kExample,
                         const SigningScope& scope = example_scope()) {
  sign(request, credentials, scope, payload_hash);
  EXPECT_EQ(request.headers.back().first, "authorization");
  const std::string& text = request.headers.back().second;
  return text.substr(text.rfind('=') + 1);
}

TEST(SigV4, AnObjectsRange) {
  HttpRequest request{.url = "https://examplebucket.s3.amazonaws.com/test.txt",
                      .headers = {{"Range", "bytes=0-9"}}};
  EXPECT_EQ(signature_of(request, kEmpty),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

// Google's rules are AWS's with other words; the signature was made by Python's hmac.
TEST(SigV4, GooglesWords) {
  HttpRequest request{.url = "https://storage.googleapis.com/bucket/test.txt",
                      .headers = {{"Range", "bytes=0-9"}}};
  SigningScope scope = example_scope();
  scope.region = "auto";
  scope.service = "storage";
  scope.dialect = Dialect::google;
  EXPECT_EQ(signature_of(request, kEmpty, kExample, scope),
            "f2d5a44b13bcc3af2c8abc76de45d6fb3af0136a26298af2565e97958b0e61a0");
}

TEST(SigV4, AnObjectThatIsPut) {
  HttpRequest request{.method = "PUT",
                      .url = "https://examplebucket.s3.amazonaws.com/test%24file.text",
                      .headers = {{"Date", "Fri, 24 May 2013 00:00:00 GMT"},
                                  {"x-amz-storage-class", "REDUCED_REDUNDANCY"}}};
  const std::string text = "Welcome to Amazon S3.";
  const std::string hash = sha256_hex(std::as_bytes(std::span(text)));
  EXPECT_EQ(hash, "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072");
  EXPECT_EQ(signature_of(request, hash),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
}

TEST(SigV4, AQueryWithoutAValue) {
  HttpRequest request{.url = "https://examplebucket.s3.amazonaws.com/?lifecycle"};
  EXPECT_EQ(signature_of(request, kEmpty),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
}

TEST(SigV4, AListing) {
  HttpRequest request{.url = "https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J"};
  EXPECT_EQ(signature_of(request, kEmpty),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
  request.url = "https://examplebucket.s3.amazonaws.com/?prefix=J&max-keys=2";
  EXPECT_EQ(signature_of(request, kEmpty),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

// AWS's test suite of SigV4, whose service is no S3: each is a request and its signature.
struct OfSuite {
  const char* name;
  HttpRequest request;
  const char* signature;
};

std::vector<OfSuite> suite() {
  const std::string host = "https://example.amazonaws.com";
  return {
      {"get-vanilla",
       {.url = host + "/"},
       "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
      {"get-vanilla without a path",
       {.url = host},
       "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
      {"get-vanilla-query-order-key-case",
       {.url = host + "/?Param2=value2&Param1=value1"},
       "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
      {"get-vanilla-query-order-value",
       {.url = host + "/?Param1=value2&Param1=value1"},
       "5772eed61e12b33fae39ee5e7012498b51d56abc0abb7c60486157bd471c4694"},
      {"get-unreserved",
       {.url = host + "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"},
       "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"},
      {"get-utf8",
       {.url = host + "/" + percent_encoded("\u1234", true)},
       "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"},
      {"get-header-key-duplicate",
       {.url = host + "/",
        .headers = {{"My-Header1", "value2"}, {"My-Header1", "value2"}, {"My-Header1", "value1"}}},
       "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea"},
      {"get-header-value-order",
       {.url = host + "/",
        .headers = {{"My-Header1", "value4"},
                    {"My-Header1", "value1"},
                    {"My-Header1", "value3"},
                    {"My-Header1", "value2"}}},
       "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01"},
      {"get-header-value-trim",
       {.url = host + "/",
        .headers = {{"My-Header1", " value1"}, {"My-Header2", " \"a   b   c\""}}},
       "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"},
      {"post-header-key-sort",
       {.method = "POST", .url = host + "/", .headers = {{"My-Header1", "value1"}}},
       "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c"},
      {"post-vanilla-query",
       {.method = "POST", .url = host + "/?Param1=value1"},
       "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11"},
  };
}

TEST(SigV4, TheSuiteOfAws) {
  const Credentials credentials{"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"};
  // 2015-08-30T12:36:00Z
  const SigningScope scope{"us-east-1", "service",
                           std::chrono::system_clock::from_time_t(1440938160)};
  for (const auto& [name, request, signature] : suite())
    EXPECT_EQ(signature_of(request, kEmpty, credentials, scope), signature) << name;
}

TEST(SigV4, AnEmptyValueIsAValue) {
  const std::string url = "https://h/x";
  EXPECT_EQ(signature_of({.url = url, .headers = {{"a", ""}, {"a", "b"}}}, kEmpty),
            signature_of({.url = url, .headers = {{"a", ",b"}}}, kEmpty));
}

TEST(SigV4, ATokenIsSigned) {
  Credentials with = kExample;
  with.token = "token";
  HttpRequest request{.url = "https://h/x"};
  EXPECT_NE(signature_of(request, kEmpty), signature_of(request, kEmpty, with));
  sign(request, with, example_scope(), kEmpty);
  EXPECT_NE(request.headers.back().second.find("x-amz-security-token"), std::string::npos);
}

}  // namespace
}  // namespace tessera::s3
