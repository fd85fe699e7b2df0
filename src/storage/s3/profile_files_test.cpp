#include "storage/s3/profile_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"
#include "storage/s3/credentials.h"

namespace tessera::s3 {
namespace {

using testing::ElementsAre;
using testing::Pair;
using testing::UnorderedElementsAre;

auto config(const std::string& text) {
  return parse_profiles(text, SectionsAre::of_config);
}
auto names(const std::string& text) {
  return parse_profiles(text, SectionsAre::names);
}

TEST(ProfileFiles, SectionsOfBothFiles) {
  EXPECT_THAT(config("[default]\na=1\n[profile x]\na=2\n[y]\na=3\n[profilez]\na=4\n[profile]\na=5\n"
                     "[profile \"with blank\"]\na=6\n[ profile\t tab ]\na=7\n"),
              UnorderedElementsAre(Pair("default", ElementsAre(Pair("a", "1"))),
                                   Pair("x", ElementsAre(Pair("a", "2"))),
                                   Pair("with blank", ElementsAre(Pair("a", "6"))),
                                   Pair("tab", ElementsAre(Pair("a", "7")))));
  EXPECT_THAT(names("[default]\na=1\n[x]\na=2\n[unclosed\na=3\n"),
              UnorderedElementsAre(Pair("default", ElementsAre(Pair("a", "1"))),
                                   Pair("x", ElementsAre(Pair("a", "2")))));
}

TEST(ProfileFiles, CommentsAndLineEnds) {
  EXPECT_THAT(
      config("\xEF\xBB\xBF# c\r\n; c\r\nlost = 1\r\n[default]\r\n\r\n  # c\r\nRegion =  x y  \r\n"
             "empty =\r\nk = a#b=c ; d\r\nno setting\r\n"),
      ElementsAre(Pair("default", UnorderedElementsAre(Pair("region", "x y"), Pair("empty", ""),
                                                       Pair("k", "a#b=c ; d")))));
}

TEST(ProfileFiles, NestedSettingsAreNoneOfTheProfile) {
  EXPECT_THAT(
      config("[default]\ns3 =\n  addressing_style = path\n\n  region = nested\n"
             "region = eu-west-1\n[services mine]\ns3 =\n  endpoint_url = no\n"
             "region = no\n"),
      UnorderedElementsAre(
          Pair("default", UnorderedElementsAre(Pair("s3", ""), Pair("region", "eu-west-1"))),
          Pair(services_section("mine"),
               UnorderedElementsAre(Pair("s3", ""), Pair("s3.endpoint_url", "no"),
                                    Pair("region", "no")))));
}

// As configparser does: deeper than the setting above, not merely indented.
TEST(ProfileFiles, IndentedSettingsAreSettings) {
  EXPECT_THAT(
      names("[x]\n  a = 1\n  b = 2\n    c = 3\n d = 4\n  e = 5\n"),
      ElementsAre(Pair("x", UnorderedElementsAre(Pair("a", "1"), Pair("b", "2"), Pair("d", "4")))));
}

TEST(ProfileFiles, CredentialsComeBeforeConfiguration) {
  AwsEnvironment environment;
  EXPECT_EQ(profile_setting("default", "region"), std::nullopt);
  environment.write_config(
      "[default]\nregion = a\nrole = c\naws_access_key_id = 1\naws_secret_access_key = 2\n"
      "aws_session_token = 3\n[profile y]\nregion = z\n");
  environment.write_credentials(
      "[default]\nregion = b\naws_access_key_id = 4\naws_secret_access_key = 5\n");
  EXPECT_EQ(profile_setting("default", "region"), "b");
  EXPECT_EQ(profile_setting("default", "role"), "c");
  EXPECT_EQ(profile_setting("default", "aws_secret_access_key"), "5");
  EXPECT_EQ(profile_setting("default", "aws_session_token"), std::nullopt);  // of the other key
  EXPECT_EQ(profile_setting("y", "region"), "z");
  EXPECT_EQ(profile_setting("z", "region"), std::nullopt);
}

TEST(ProfileFiles, FilesCanBeNamed) {
  AwsEnvironment environment;
  environment.set("AWS_CONFIG_FILE", environment.write("c", "[default]\nregion = a\n"));
  environment.set("AWS_SHARED_CREDENTIALS_FILE", "~/s");
  (void)environment.write("s", "[default]\noutput = json\n");
  EXPECT_EQ(profile_setting("default", "region"), "a");
  EXPECT_EQ(profile_setting("default", "output"), "json");
  environment.set("AWS_CONFIG_FILE", "/dev/null");
  EXPECT_EQ(profile_setting("default", "region"), std::nullopt);
}

TEST(ProfileFiles, FilesThatCannotBeReadAreErrors) {
  AwsEnvironment environment;
  environment.set("AWS_CONFIG_FILE", environment.write("large", std::string((1U << 20U) + 1, '#')));
  EXPECT_EQ(code_of([] { (void)profile_setting("default", "region"); }), ErrorCode::limit);
  environment.set("AWS_CONFIG_FILE", ::testing::TempDir());
  EXPECT_EQ(code_of([] { (void)profile_setting("default", "region"); }), ErrorCode::io);
}

}  // namespace
}  // namespace tessera::s3
