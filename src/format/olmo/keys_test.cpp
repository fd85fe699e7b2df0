#include "format/olmo/keys.h"

#include <gtest/gtest.h>

#include "format/safetensors/safetensors.h"
#include "format/test_support.h"
#include "value/render.h"

namespace tessera::olmo {
namespace {

// F-06: every name of OLMo's own file, there and back.
TEST(OlmoKeys, AreThoseOfAGoldenFile) {
  const auto source = test::source(test::golden("olmo.safetensors"));
  std::vector<std::string> seen;
  for (const auto& entry : safetensors::read_header(*source).entries) {
    const std::optional<Key> key = decode_key(entry.name);
    ASSERT_TRUE(key) << entry.name;
    EXPECT_EQ(encode_key(*key), entry.name);
    seen.push_back(render(Value::tuple({Value::tuple(key->keys), key->pickled})));
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen,
            (std::vector<std::string>{"(('param_groups',), True)", "(('state', 0, 'step'), False)",
                                      "(('transformer.wte.weight',), False)"}));
}

TEST(OlmoKeys, TheExampleOfTheSpecification) {
  EXPECT_EQ(encode_key({{"state", 0, "step"}, false}),
            "gASVFwAAAAAAAACMBXN0YXRllEsAjARzdGVwlIeUiYaULg==");
}

// Lengths 0, 1 and 2 beyond a multiple of three: every form of padding.
TEST(OlmoKeys, OfAnyLength) {
  for (std::size_t length = 1; length < 300; length += 7) {
    const Key key{{Value(std::string(length, 'x')), 7}, length % 2 == 0};
    const std::optional<Key> back = decode_key(encode_key(key));
    ASSERT_TRUE(back);
    EXPECT_EQ(Value::tuple(back->keys), Value::tuple(key.keys));
    EXPECT_EQ(back->pickled, key.pickled);
  }
}

TEST(OlmoKeys, OtherNamesAreNone) {
  for (const char* name : {"", "weight", "model.layers.0.weight", "gASV", "AAAA", "gAQu",
                           "gASVFwAAAAAAAACMBXN0YXRllEsAjARzdGVwlIeUiYaULg=",
                           "gASVFwAAAAAAAACMBXN0YXRllEsAjARzdGVwlIeUiYaULg+/", "===="}) {
    EXPECT_FALSE(decode_key(name)) << name;
  }
  // A pickle of something else, and one that would call something.
  EXPECT_FALSE(decode_key(encode_key({{}, false})));
  EXPECT_FALSE(decode_key("Y29zCnN5c3RlbQooUydpZCcKdFIu"));
}

TEST(OlmoKeys, ValuesAsPickles) {
  const Value groups =
      Value::list({Value::dict({{"lr", 0.5}, {"betas", Value::tuple({0.9, 1.0})}})});
  EXPECT_EQ(decode_value(encode_value(groups)), groups);
  const auto [code, refused] = test::thrown([] { (void)encode_value(Value::list({Tensor{}})); });
  EXPECT_TRUE(refused && code == ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera::olmo
