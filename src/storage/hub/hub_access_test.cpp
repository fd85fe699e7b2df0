#include "storage/hub/hub_access.h"

#include <gtest/gtest.h>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"

namespace tessera::hub {
namespace {

class HubAccessOfEnvironment : public testing::Test {
 protected:
  AwsEnvironment environment_;
};

TEST_F(HubAccessOfEnvironment, NothingSaysThePublicHubAndNoToken) {
  const HubAccess access = hub_access();
  EXPECT_EQ(to_string(access.endpoint), "https://huggingface.co");
  EXPECT_EQ(access.token, "");
}

TEST_F(HubAccessOfEnvironment, TokensAreLookedForInOrder) {
  const std::string other = environment_.write("other/token", " of file\r\n");
  (void)environment_.write(".cache/huggingface/token", "of cache\n");
  EXPECT_EQ(hub_access().token, "of cache");
  environment_.set("XDG_CACHE_HOME", environment_.write("xdg/x", "") + "/..");
  EXPECT_EQ(hub_access().token, "");
  (void)environment_.write("xdg/huggingface/token", "of xdg");
  environment_.set("XDG_CACHE_HOME", "~/xdg");
  EXPECT_EQ(hub_access().token, "of xdg");
  (void)environment_.write("hf/token", "of home");
  environment_.set("HF_HOME", "~/hf");
  EXPECT_EQ(hub_access().token, "of home");
  environment_.set("PLACE", "hf");
  for (const char* home :
       {"~/$PLACE", "~/${PLACE}", "$HOME/hf", "$HOME/${PLACE}/.", "~/./$PLACE"}) {
    environment_.set("HF_HOME", home);
    EXPECT_EQ(hub_access().token, "of home") << home;
  }
  for (const char* home : {"~/$PLACES", "~/${PLACE", "~/$", "~/hf$", "~/$$PLACE"}) {
    environment_.set("HF_HOME", home);
    EXPECT_EQ(hub_access().token, "") << home;
  }
  environment_.set("HF_HOME", "~");
  (void)environment_.write("token", "of ~");
  EXPECT_EQ(hub_access().token, "of ~");
  environment_.set("HF_TOKEN_PATH", other);
  EXPECT_EQ(hub_access().token, "of file");
  EXPECT_EQ(hub_access().token_from, other);
  environment_.set("HUGGING_FACE_HUB_TOKEN", "of old");
  EXPECT_EQ(hub_access().token, "of old");
  environment_.set("HF_TOKEN", " \n");
  EXPECT_EQ(hub_access().token, "of old");
  environment_.set("HF_TOKEN", "of variable");
  EXPECT_EQ(hub_access().token, "of variable");
  EXPECT_EQ(hub_access().token_from, "HF_TOKEN");
  environment_.set("HF_HUB_DISABLE_IMPLICIT_TOKEN", "True");
  EXPECT_EQ(hub_access().token, "");
}

TEST_F(HubAccessOfEnvironment, TheTokenIsForTheEndpointAlone) {
  environment_.set("HF_ENDPOINT", "https://Hub.example/hf//");
  const HubAccess access = hub_access();
  EXPECT_EQ(to_string(access.endpoint), "https://Hub.example/hf");
  EXPECT_TRUE(access.is_own("https://hub.example/api"));
  EXPECT_TRUE(access.is_own("https://hub.example:443/api"));
  for (const char* other : {"http://hub.example/api", "https://hub.example:8443/api",
                            "https://cdn.hub.example/api", "https://hub.example.org/api"})
    EXPECT_FALSE(access.is_own(other)) << other;
}

TEST_F(HubAccessOfEnvironment, WhatCannotBeAskedIsRefused) {
  for (const char* endpoint : {"huggingface.co", "ftp://h", "https://h?x=1", "https://u:p@h"}) {
    environment_.set("HF_ENDPOINT", endpoint);
    const Error error = error_of([] { (void)hub_access(); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << endpoint;
    EXPECT_EQ(std::string(error.what()).find("u:p"), std::string::npos);
  }
}

TEST_F(HubAccessOfEnvironment, OfflineNothingIsAsked) {
  environment_.set("TRANSFORMERS_OFFLINE", "1");
  EXPECT_EQ(code_of([] { (void)hub_access(); }), ErrorCode::unsupported);
  environment_.set("HF_HUB_OFFLINE", "0");
  EXPECT_EQ(hub_access().token, "");
  environment_.set("HF_HUB_OFFLINE", "1");
  EXPECT_EQ(code_of([] { (void)hub_access(); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera::hub
