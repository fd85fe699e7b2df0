#include "storage/s3/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"

namespace tessera::s3 {
namespace {

using testing::HasSubstr;

class S3Settings : public testing::Test {
 protected:
  static Settings of(const std::string& url) { return settings_for(parse_bucket_uri(url)); }
  static std::string refusal_of(const std::string& url) {
    const Error error = error_of([&] { (void)of(url); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << url;
    return error.message();
  }

  AwsEnvironment environment_;
};

TEST_F(S3Settings, AwsWithoutAnyVariable) {
  const Settings settings = of("s3://bucket/run/step1");
  EXPECT_EQ(settings.endpoint, "https://s3.us-east-1.amazonaws.com");
  EXPECT_EQ(settings.region, "us-east-1");
  EXPECT_EQ(settings.profile, "");
  EXPECT_EQ(settings.bucket, "bucket");
  EXPECT_EQ(settings.prefix, "run/step1");
  EXPECT_FALSE(settings.is_path_style);
  EXPECT_FALSE(settings.is_google);
}

TEST_F(S3Settings, BucketsThatAreNoLabelOfAHostAreInThePath) {
  EXPECT_FALSE(of("s3://my-bucket-7/x").is_path_style);
  for (const char* url : {"s3://my.bucket/x", "s3://My-Bucket/x", "s3://my_bucket/x"})
    EXPECT_TRUE(of(url).is_path_style) << url;
}

TEST_F(S3Settings, RegionsOfVariablesComeBeforeThoseOfProfiles) {
  environment_.write_config(
      "[default]\nregion = eu-west-1\n[profile other]\nregion = ap-south-1\n");
  EXPECT_EQ(of("s3://b/x").region, "eu-west-1");
  environment_.set("AWS_PROFILE", "other");
  EXPECT_EQ(of("s3://b/x").region, "ap-south-1");
  EXPECT_EQ(of("s3://b/x").profile, "other");
  environment_.set("AWS_DEFAULT_REGION", "cn-north-1");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://s3.cn-north-1.amazonaws.com.cn");
  environment_.set("AWS_REGION", "eu-central-1");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://s3.eu-central-1.amazonaws.com");
  environment_.set("AWS_REGION", "evil.com/");
  EXPECT_THAT(refusal_of("s3://b/x"), HasSubstr("AWS_REGION"));
}

TEST_F(S3Settings, NamedEndpointsHaveTheBucketInThePath) {
  environment_.write_config(
      "[default]\nendpoint_url = https://profile.example/base/\nservices = mine\n"
      "[services mine]\ns3 =\n  endpoint_url = https://services.example\n");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://services.example");
  environment_.set("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/");
  EXPECT_EQ(of("s3://b/x").endpoint, "http://127.0.0.1:9000");
  environment_.set("AWS_ENDPOINT_URL_S3", "https://minio.example");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://minio.example");
  EXPECT_TRUE(of("s3://b/x").is_path_style);
  EXPECT_EQ(of("s3://b/x").region, "us-east-1");
}

TEST_F(S3Settings, WhatWouldNameAnotherServerIsHeededOrRefused) {
  environment_.write_config(
      "[default]\nservices = mine\n[services mine]\ndynamodb =\n  endpoint_url = "
      "https://d.example\n"
      "s3 =\n  max_attempts = 2\n  endpoint_url = https://s.example\n[profile x]\nregion = r\n");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://s.example");
  environment_.set("AWS_ENDPOINT_URL", "https://variable.example");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://variable.example");
  environment_.unset("AWS_ENDPOINT_URL");
  environment_.write_config("[default]\nservices = none\n");
  EXPECT_EQ(of("s3://b/x").endpoint, "https://s3.us-east-1.amazonaws.com");
  environment_.write_config("[default]\nca_bundle = /x.pem\n");
  EXPECT_THAT(refusal_of("s3://b/x"), HasSubstr("AWS_CA_BUNDLE"));
  environment_.set("AWS_CA_BUNDLE", "/x.pem");
  EXPECT_EQ(of("s3://b/x").ca_file, "/x.pem");
  for (const char* name : {"AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"}) {
    environment_.set(name, "true");
    EXPECT_THAT(refusal_of("s3://b/x"), HasSubstr(name));
    environment_.set(name, "false");
    EXPECT_EQ(of("s3://b/x").bucket, "b");
  }
}

TEST_F(S3Settings, EndpointsThatAreNoneNameTheirVariable) {
  for (const char* value : {"minio.example", "ftp://minio.example", "https://", "https://h/?x=1",
                            "https://user:hunter2@h", "https://h h"}) {
    environment_.set("AWS_ENDPOINT_URL", value);
    const std::string text = refusal_of("s3://b/x");
    EXPECT_THAT(text, HasSubstr("AWS_ENDPOINT_URL")) << value;
    EXPECT_THAT(text, testing::Not(HasSubstr("hunter2")));
  }
  AwsEnvironment::unset("AWS_ENDPOINT_URL");
  environment_.write_config("[default]\nendpoint_url = minio\n");
  EXPECT_THAT(refusal_of("s3://b/x"), HasSubstr("endpoint_url of the profile 'default'"));
}

TEST_F(S3Settings, StylesCanBeChosen) {
  environment_.set("TESSERA_S3_STYLE", "path");
  EXPECT_TRUE(of("s3://b/x").is_path_style);
  environment_.set("AWS_ENDPOINT_URL", "https://minio.example");
  environment_.set("TESSERA_S3_STYLE", "host");
  EXPECT_FALSE(of("s3://b/x").is_path_style);
  environment_.set("TESSERA_S3_STYLE", "virtual");
  EXPECT_THAT(refusal_of("s3://b/x"), HasSubstr("TESSERA_S3_STYLE"));
}

// The variables of OLMo (checkpoint-rows O-07 and O-08).
TEST_F(S3Settings, OlmosVariables) {
  environment_.set("AWS_PROFILE", "default");
  environment_.set("AWS_ENDPOINT_URL", "https://not.for.these");
  environment_.set("S3_PROFILE", "s");
  EXPECT_EQ(of("s3://b/x").profile, "s");
  EXPECT_THAT(refusal_of("r2://b/x"), HasSubstr("R2_ENDPOINT_URL"));
  EXPECT_THAT(refusal_of("weka://b/x"), HasSubstr("WEKA_ENDPOINT_URL"));
  environment_.set("R2_ENDPOINT_URL", "https://account.r2.cloudflarestorage.com/");
  environment_.set("R2_PROFILE", "r");
  environment_.set("WEKA_ENDPOINT_URL", "https://weka-aus.beaker.org:9000");
  environment_.set("WEKA_PROFILE", "w");
  const Settings r2 = of("r2://b/x"), weka = of("weka://b/x");
  EXPECT_EQ(r2.endpoint, "https://account.r2.cloudflarestorage.com");
  EXPECT_EQ(r2.profile, "r");
  EXPECT_EQ(r2.region, "auto");
  EXPECT_TRUE(r2.is_path_style);
  EXPECT_EQ(weka.endpoint, "https://weka-aus.beaker.org:9000");
  EXPECT_EQ(weka.profile, "w");
  EXPECT_TRUE(weka.is_path_style);
}

TEST_F(S3Settings, Google) {
  environment_.set("AWS_ENDPOINT_URL", "https://not.for.this");
  environment_.set("GS_PROFILE", "g");
  const Settings settings = of("gs://b/x");
  EXPECT_EQ(settings.endpoint, "https://storage.googleapis.com");
  EXPECT_EQ(settings.profile, "g");
  EXPECT_EQ(settings.region, "auto");
  EXPECT_TRUE(settings.is_google);
}

TEST_F(S3Settings, Prefixes) {
  EXPECT_EQ(of("s3://b").prefix, "");
  EXPECT_EQ(of("s3://b/").prefix, "");
  EXPECT_EQ(of("s3://b/a/b/").prefix, "a/b");
  EXPECT_EQ(of("s3://b/a b%20+c").prefix, "a b%20+c");  // keys are not encoded
  EXPECT_EQ(of("s3://b/.a/..b/c.").prefix, ".a/..b/c.");
  for (const char* url : {"s3://b//a", "s3://b/a//b", "s3://b/a//", "s3://b/../c", "s3://b/a/..",
                          "s3://b/./a", "s3://b//"})
    EXPECT_THAT(refusal_of(url), HasSubstr("a part of the key")) << url;
}

TEST_F(S3Settings, WhatIsNoBucketsName) {
  for (const char* url : {"s3://-b/x", "s3://b./x", "s3://.../x", "s3://[fe80]/x"})
    EXPECT_THAT(refusal_of(url), HasSubstr("cannot be a bucket's name")) << url;
  EXPECT_THAT(refusal_of("s3://" + std::string(256, 'b')), HasSubstr("cannot be"));
  EXPECT_THAT(refusal_of("s3://b:80/x"), HasSubstr("port"));
  EXPECT_EQ(of("s3://b/x?y#z%23").prefix, "x?y#z%23");  // as other tools take a key
}

TEST(S3Regions, AreLabelsOfAHost) {
  for (const char* name : {"us-east-1", "auto", "EU"})
    EXPECT_EQ(is_region(name), std::string(name) != "EU") << name;
  for (const char* name : {"", "-a", "a-", "a.b", "a/b", "a b", "a\n", "\u00e4"})
    EXPECT_FALSE(is_region(name)) << name;
}

}  // namespace
}  // namespace tessera::s3
