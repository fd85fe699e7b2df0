#include "storage/s3/providers.h"

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"
#include "conformance/loopback_server.h"

namespace tessera::s3 {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::Not;

// In no error.
constexpr const char* kSecret = "hunter2";

std::string json(const std::string& more = {}) {
  return R"({"Version": 1, "AccessKeyId": "id", "SecretAccessKey": ")" + std::string(kSecret) +
         "\"" + more + "}";
}

std::string xml_of(const std::string& action) {
  return "<" + action + "Response xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><" + action +
         "Result><Credentials><AccessKeyId>of role</AccessKeyId><SecretAccessKey>" + kSecret +
         "</SecretAccessKey><SessionToken>a+b/c=</SessionToken>"
         "<Expiration>2036-11-25T03:00:00Z</Expiration></Credentials></" +
         action + "Result></" + action + "Response>";
}

class Providers : public testing::Test {
 protected:
  // A program that is no part of this test, and its path.
  std::string script(const std::string& text) const {
    const std::string path =
        environment_.write("bin/script" + std::to_string(++scripts_), "#!/bin/sh\n" + text + "\n");
    ::chmod(path.c_str(), 0700);
    return path;
  }
  std::string key_id(const std::string& profile = {}) {
    return find_credentials(profile, client_).key_id;
  }
  Error failure(const std::string& profile = {}) {
    Error error = error_of([&] { (void)find_credentials(profile, client_); });
    EXPECT_THAT(error.what(), Not(HasSubstr(kSecret)));
    return error;
  }

  AwsEnvironment environment_;
  HttpClient client_{{.operation_within = 5s, .first_pause = 2ms, .most_unanswered = 2}};
  mutable int scripts_ = 0;
};

TEST_F(Providers, TheOrder) {
  EXPECT_EQ(failure().code(), ErrorCode::not_found);
  EXPECT_THAT(failure().message(), HasSubstr("AWS_WEB_IDENTITY_TOKEN_FILE"));
  environment_.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://example.com/");
  EXPECT_EQ(failure().code(), ErrorCode::unsafe);
  environment_.write_config("[default]\ncredential_process = " + script("echo '" + json() + "'") +
                            "\n");
  EXPECT_EQ(key_id(), "id");
  environment_.write_credentials(
      "[default]\naws_access_key_id = of file\naws_secret_access_key = s\n"
      "[other]\naws_access_key_id = of other\naws_secret_access_key = s\n");
  EXPECT_EQ(key_id(), "of file");
  environment_.set("AWS_WEB_IDENTITY_TOKEN_FILE", environment_.write("token", kSecret));
  EXPECT_THAT(failure().message(), HasSubstr("ARN"));
  environment_.set("AWS_ACCESS_KEY_ID", "of environment");
  EXPECT_THAT(failure().message(), HasSubstr("AWS_SECRET_ACCESS_KEY"));
  environment_.set("AWS_SECRET_ACCESS_KEY", "s");
  EXPECT_EQ(key_id(), "of environment");
  EXPECT_EQ(key_id("other"), "of other");  // since it was named
  EXPECT_EQ(failure("none").code(), ErrorCode::not_found);
}

TEST_F(Providers, ProfilesThatAreNotEnough) {
  environment_.write_config(
      "[profile region]\nregion = eu-west-1\n"
      "[profile half]\naws_access_key_id = id\n"
      "[profile sso]\nsso_session = mine\n"
      "[profile mfa]\nrole_arn = r\nsource_profile = mfa\nmfa_serial = arn\n"
      "[profile a]\nrole_arn = r\nsource_profile = b\n"
      "[profile b]\nrole_arn = r\nsource_profile = a\n"
      "[profile odd]\nrole_arn = r\ncredential_source = Wallet\n"
      "[profile lost]\nrole_arn = r\nsource_profile = none\n"
      "[profile empty]\nrole_arn = r\ncredential_source = Environment\n");
  EXPECT_EQ(failure("region").code(), ErrorCode::not_found);
  EXPECT_EQ(failure("half").code(), ErrorCode::invalid_argument);
  EXPECT_THAT(failure("sso").message(), HasSubstr("export-credentials"));
  EXPECT_EQ(failure("mfa").code(), ErrorCode::unsupported);
  EXPECT_EQ(failure("a").code(), ErrorCode::invalid_argument);
  EXPECT_THAT(failure("odd").message(), HasSubstr("Wallet"));
  EXPECT_THAT(failure("lost").message(), HasSubstr("'none'"));
  EXPECT_EQ(failure("empty").code(), ErrorCode::not_found);
}

TEST_F(Providers, AProcessSaysWhatItWasAskedFor) {
  const Credentials found = of_process(script(
      "echo '" + json(R"(, "SessionToken": "t", "Expiration": "2036-11-25T03:00:00Z")") + "'"));
  EXPECT_EQ(found.key_id, "id");
  EXPECT_EQ(found.secret, kSecret);
  EXPECT_EQ(found.token, "t");
  EXPECT_TRUE(found.expires);
  const Credentials plain =
      of_process(script("echo '" + json(R"(, "SessionToken": null, "Expiration": null)") + "'"));
  EXPECT_EQ(plain.token, "");
  EXPECT_FALSE(plain.expires);
}

TEST_F(Providers, WordsOfAProcessAreThoseOfAShell) {
  // Tells its arguments as the id of the key, each in brackets.
  const std::string path = script(
      "for word; do all=\"$all[$word]\"; done\n"
      "printf '{\"Version\": 1, \"AccessKeyId\": \"x%s\", \"SecretAccessKey\": \"s\"}' "
      "\"$(printf %s \"$all\" | sed 's/[\\\\\"]/\\\\&/g')\"");
  const auto words = [&](const std::string& line) { return of_process(path + line).key_id; };
  EXPECT_EQ(words(""), "x");
  EXPECT_EQ(words("  a\tb "), "x[a][b]");
  EXPECT_EQ(words(" 'a b' \"c d\"e '' f\\ g"), "x[a b][c de][][f g]");
  EXPECT_EQ(words(R"( "a\$b\"c" 'd\e' f\\)"), R"(x[a\$b"c][d\e][f\])");
  EXPECT_EQ(words(" $HOME `id` a;b *"), "x[$HOME][`id`][a;b][*]");
  EXPECT_EQ(words(" \"it's\" \"a b\"'c d'"), "x[it's][a bc d]");
  EXPECT_EQ(code_of([&] { (void)of_process(path + " 'a"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([] { (void)of_process("  "); }), ErrorCode::invalid_argument);
}

TEST_F(Providers, AProcessIsLookedForInThePath) {
  const std::string path = script("echo '" + json(R"(, "SessionToken": "'"$MARK"'")") + "'");
  const std::size_t slash = path.rfind('/');
  const std::string before = ::getenv("PATH");
  environment_.set("MARK", "is passed on");
  ::setenv("PATH", (":/no/such:" + before + ":" + path.substr(0, slash)).c_str(), 1);
  EXPECT_EQ(of_process(path.substr(slash + 1)).token, "is passed on");
  ::setenv("PATH", before.c_str(), 1);
  EXPECT_EQ(code_of([&] { (void)of_process(path.substr(slash + 1)); }), ErrorCode::io);
}

TEST_F(Providers, ProcessesThatFailSayNothing) {
  const std::string secret = kSecret;
  const auto why = [&](const std::string& text, std::chrono::milliseconds within = 10s) {
    const std::string path = script(text);
    const Error error = error_of([&] { (void)of_process(path + " " + secret, within); });
    EXPECT_EQ(error.code(), ErrorCode::io) << text;
    EXPECT_THAT(error.what(), Not(HasSubstr(secret))) << text;
    EXPECT_THAT(error.what(), HasSubstr(path)) << text;
    return error.message();
  };
  testing::internal::CaptureStderr();
  EXPECT_THAT(why("echo " + secret + " >&2; echo " + secret + "; exit 3"), HasSubstr("code 3"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(why("kill -9 $$"), HasSubstr("killed"));
  EXPECT_THAT(why("echo " + secret), HasSubstr("version 1"));
  EXPECT_THAT(why("echo '{\"Version\": 2, \"AccessKeyId\": \"i\", \"SecretAccessKey\": \"s\"}'"),
              HasSubstr("version 1"));
  EXPECT_THAT(why("echo '{\"Version\": 1, \"AccessKeyId\": \"" + secret + "\"}'"),
              HasSubstr("no SecretAccessKey"));
  EXPECT_THAT(why("echo '{\"Version\": 1, \"AccessKeyId\": [\"" + secret + "\"]}'"),
              HasSubstr("is no text"));
  EXPECT_THAT(why("exec yes"), HasSubstr("1 MiB"));
  EXPECT_THAT(why("exec sleep 100", 50ms), HasSubstr("too long"));
  EXPECT_THAT(why("while echo; do sleep 0.02; done", 200ms), HasSubstr("too long"));
  EXPECT_THAT(why("exec >&-; exec sleep 100", 50ms), HasSubstr("too long"));
  EXPECT_THAT(error_of([] { (void)of_process("/none/such x"); }).message(), HasSubstr("started"));
}

TEST_F(Providers, AProcessReadsNothing) {
  EXPECT_EQ(of_process(script("cat; echo '" + json() + "'")).key_id, "id");
}

TEST_F(Providers, RolesByTheTokenOfAFile) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{http_answer(200, xml_of("AssumeRoleWithWebIdentity"))};
  });
  environment_.set("AWS_ENDPOINT_URL_STS", server.url(""));
  environment_.set("AWS_WEB_IDENTITY_TOKEN_FILE", environment_.write("token", "a+b&c\n"));
  environment_.set("AWS_ROLE_ARN", "arn:aws:iam::1:role/x");
  const Credentials found = find_credentials({}, client_);
  EXPECT_EQ(found.key_id, "of role");
  EXPECT_EQ(found.secret, kSecret);
  EXPECT_EQ(found.token, "a+b/c=");
  EXPECT_TRUE(found.expires);
  EXPECT_THAT(server.request(1), testing::StartsWith("POST / HTTP/1.1\r\n"));
  EXPECT_THAT(
      server.request(1),
      testing::EndsWith("Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=arn%3Aaws"
                        "%3Aiam%3A%3A1%3Arole%2Fx&RoleSessionName=tessera&WebIdentityToken="
                        "a%2Bb%26c"));
  EXPECT_THAT(server.request(1), Not(HasSubstr("uthorization")));
}

TEST_F(Providers, RolesByOtherProfiles) {
  LoopbackServer server(
      [](int, const std::string&) { return Scripted{http_answer(200, xml_of("AssumeRole"))}; });
  environment_.set("AWS_ENDPOINT_URL_STS", server.url(""));
  environment_.write_config(
      "[profile top]\nrole_arn = t\nsource_profile = middle\nexternal_id = e\n"
      "role_session_name = n\nduration_seconds = 900\nregion = eu-west-1\n"
      "[profile middle]\nrole_arn = m\nsource_profile = middle\naws_access_key_id = own\n"
      "aws_secret_access_key = s\n"
      "[profile variables]\nrole_arn = v\ncredential_source = Environment\n");
  EXPECT_EQ(key_id("top"), "of role");
  ASSERT_EQ(server.requests(), 2);
  EXPECT_THAT(server.request(1), HasSubstr("Credential=own/"));
  EXPECT_THAT(server.request(1), HasSubstr("/us-east-1/sts/aws4_request"));
  EXPECT_THAT(server.request(1), HasSubstr("RoleArn=m&"));
  EXPECT_THAT(server.request(2), HasSubstr("Credential=of role/"));
  EXPECT_THAT(server.request(2), HasSubstr("/eu-west-1/sts/aws4_request"));
  EXPECT_THAT(server.request(2), HasSubstr("x-amz-security-token: a+b/c=\r\n"));
  EXPECT_THAT(server.request(2),
              testing::EndsWith("RoleArn=t&RoleSessionName=n&ExternalId=e&DurationSeconds=900"));
  environment_.set("AWS_ACCESS_KEY_ID", "of environment");
  environment_.set("AWS_SECRET_ACCESS_KEY", "s");
  EXPECT_EQ(key_id("variables"), "of role");
  EXPECT_THAT(server.request(3), HasSubstr("Credential=of environment/"));
}

TEST_F(Providers, TokenServicesThatRefuseRepeatNothing) {
  std::string answer;
  LoopbackServer server([&](int, const std::string&) { return Scripted{answer}; });
  environment_.set("AWS_ENDPOINT_URL_STS", server.url(""));
  environment_.set("AWS_WEB_IDENTITY_TOKEN_FILE", environment_.write("token", kSecret));
  environment_.set("AWS_ROLE_ARN", "arn");
  const std::string secret = kSecret;
  answer = http_answer(400, "<ErrorResponse><Error><Code>ExpiredTokenException</Code><Message>" +
                                secret + "</Message></Error></ErrorResponse>");
  EXPECT_THAT(failure().message(), HasSubstr("400, ExpiredTokenException"));
  answer = http_answer(403, "<Code>" + secret + "</Code>");
  EXPECT_THAT(failure().message(), testing::EndsWith("403"));
  for (const std::string& body :
       {secret, "<a>" + secret + "</a>", std::string(), xml_of("AssumeRole"), "<a>" + secret}) {
    answer = http_answer(200, body);
    EXPECT_EQ(failure().code(), ErrorCode::io) << body;
  }
}

TEST_F(Providers, OfAContainer) {
  LoopbackServer server([](int, const std::string&) {
    return Scripted{
        http_answer(200, json(R"(, "Token": "t", "Expiration": "2036-11-25T03:00:00Z")"))};
  });
  environment_.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url("/creds?x=1"));
  environment_.set("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of variable");
  const Credentials found = find_credentials({}, client_);
  EXPECT_EQ(found.key_id, "id");
  EXPECT_EQ(found.token, "t");
  EXPECT_TRUE(found.expires);
  EXPECT_THAT(server.request(1), testing::StartsWith("GET /creds?x=1 HTTP/1.1\r\n"));
  EXPECT_THAT(server.request(1), HasSubstr("authorization: of variable\r\n"));
  environment_.set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", environment_.write("t", "of file\n"));
  (void)of_container();
  EXPECT_THAT(server.request(2), HasSubstr("authorization: of file\r\n"));
}

TEST_F(Providers, ContainersThatAreElsewhere) {
  for (const char* url : {"http://example.com/x", "http://169.254.170.3/", "http://10.0.0.1/",
                          "http://127.0.0.1.example.com/"}) {
    environment_.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", url);
    EXPECT_EQ(failure().code(), ErrorCode::unsafe) << url;
  }
  environment_.set("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", ".example.com/x");
  EXPECT_EQ(failure().code(), ErrorCode::unsafe);
  environment_.set("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "@example.com/x");
  EXPECT_EQ(failure().code(), ErrorCode::invalid_argument);
}

TEST_F(Providers, ContainersThatRefuseRepeatNothing) {
  std::string answer = http_answer(404, kSecret);
  LoopbackServer server([&](int, const std::string&) { return Scripted{answer}; });
  environment_.set("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url());
  environment_.set("AWS_CONTAINER_AUTHORIZATION_TOKEN", kSecret);
  EXPECT_THAT(failure().message(), HasSubstr("404"));
  answer = http_answer(200, kSecret);
  EXPECT_THAT(failure().message(), HasSubstr("no JSON"));
  environment_.set("AWS_CONTAINER_AUTHORIZATION_TOKEN", std::string(kSecret) + "\r\nx: y");
  EXPECT_EQ(failure().code(), ErrorCode::invalid_argument);
}

TEST_F(Providers, OfAnInstance) {
  LoopbackServer server([](int, const std::string& request) {
    if (request.starts_with("PUT /latest/api/token ")) return Scripted{http_answer(200, "for now")};
    if (request.find("x-aws-ec2-metadata-token: for now\r\n") == std::string::npos)
      return Scripted{http_answer(401, "")};
    const std::string roles = "GET /latest/meta-data/iam/security-credentials/";
    if (request.starts_with(roles + " ")) return Scripted{http_answer(200, "my role\r\nother")};
    if (request.starts_with(roles + "my%20role "))
      return Scripted{http_answer(200, json(R"(, "Token": "t")"))};
    return Scripted{http_answer(500, "")};
  });
  environment_.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url());
  EXPECT_EQ(failure().code(), ErrorCode::not_found);  // it is disabled
  environment_.set("AWS_EC2_METADATA_DISABLED", "false");
  const Credentials found = find_credentials({}, client_);
  EXPECT_EQ(found.key_id, "id");
  EXPECT_EQ(found.token, "t");
  EXPECT_THAT(server.request(1), HasSubstr("x-aws-ec2-metadata-token-ttl-seconds: 21600\r\n"));
}

TEST_F(Providers, MachinesThatAreNoInstance) {
  environment_.set("AWS_EC2_METADATA_DISABLED", "false");
  for (const int status : {403, 404, 405}) {
    LoopbackServer server(
        [&](int, const std::string&) { return Scripted{http_answer(status, "")}; });
    environment_.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url());
    EXPECT_FALSE(of_instance());
    EXPECT_EQ(failure().code(), ErrorCode::not_found);
    server.stop();
    EXPECT_EQ(failure().code(), ErrorCode::not_found);
  }
  environment_.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://example.com");
  EXPECT_EQ(failure().code(), ErrorCode::unsafe);
}

TEST_F(Providers, AnInstanceWithoutARole) {
  LoopbackServer server([](int number, const std::string&) {
    return Scripted{number == 1 ? http_answer(200, "token") : http_answer(404, "none")};
  });
  environment_.set("AWS_EC2_METADATA_DISABLED", "false");
  environment_.set("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url());
  EXPECT_FALSE(of_instance());
  EXPECT_EQ(server.requests(), 2);
}

}  // namespace
}  // namespace tessera::s3
