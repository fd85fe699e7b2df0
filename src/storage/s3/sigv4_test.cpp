#include "storage/s3/sigv4.h"

#include <gtest/gtest.h>

#include <span>

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
