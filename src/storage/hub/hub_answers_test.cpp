#include "storage/hub/hub_answers.h"

#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera::hub {
namespace {

TEST(HubAnswers, TreesHaveFilesAndDirectories) {
  const auto entries = entries_in(R"([
    {"type": "directory", "oid": "d1", "size": 0, "path": "sub"},
    {"type": "file", "oid": "g1", "size": 5, "path": "config.json", "new": [1]},
    {"type": "file", "oid": "g2", "size": 7, "path": "model.safetensors",
     "lfs": {"oid": "s2", "size": 7, "pointerSize": 1}, "xetHash": "x"},
    {"type": "commit", "oid": "c", "size": 0, "path": "module"}])");
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_TRUE(entries[0].is_directory);
  EXPECT_EQ(entries[1].path, "config.json");
  EXPECT_EQ(entries[1].size, 5U);
  EXPECT_EQ(entries[1].content, "g1");
  EXPECT_EQ(entries[2].content, "s2");  // of its bytes, not of the pointer in git
}

// Nobody would notice that they are missing.
TEST(HubAnswers, NamesThatNoFileCanHaveAreNotPassedOver) {
  for (const char* name : {"../x", "/x", "a//b", "", ".", "a/..", "a/", "a\\u0000b"}) {
    for (const char* type : {"file", "directory"}) {
      const std::string tree = std::string(R"([{"type": "file", "path": "x", "size": 1},)") +
                               R"({"type": ")" + type + R"(", "size": 1, "path": ")" + name +
                               "\"}]";
      const Error error = error_of([&] { (void)entries_in(tree); });
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << name;
    }
  }
}

TEST(HubAnswers, OtherJsonIsNoTree) {
  for (const char* text :
       {"", "{", "{}", "[1]", R"([{"type": "file", "path": "x"}])", R"([{"path": "x", "size": 1}])",
        R"([{"type": "file", "path": 1, "size": 1}])",
        R"([{"type": "file", "path": "x", "size": -1}])",
        R"([{"type": "file", "path": "x", "size": 1e30}])",
        R"([{"type": "file", "path": "x", "size": 9223372036854775808}])",
        "<html>please log in</html>"}) {
    EXPECT_EQ(code_of([&] { (void)entries_in(text); }), ErrorCode::corrupt) << text;
  }
}

TEST(HubAnswers, ARevisionIsACommit) {
  const std::string commit(40, 'a');
  EXPECT_EQ(commit_in(R"({"id": "o/m", "sha": ")" + commit + "\"}"), commit);
  for (const std::string& text : {std::string("{}"), std::string(R"({"sha": "main"})"),
                                  R"({"sha": ")" + commit.substr(1) + "/\"}", std::string("[]")}) {
    EXPECT_EQ(code_of([&] { (void)commit_in(text); }), ErrorCode::corrupt) << text;
  }
}

TEST(HubAnswers, TheNextPageIsALink) {
  EXPECT_EQ(next_query(""), "");
  EXPECT_EQ(next_query("<https://h/api?recursive=true&cursor=a%3D>; rel=\"next\""),
            "recursive=true&cursor=a%3D");
  EXPECT_EQ(next_query("<https://h/a?b,c>; rel=\"prev\", <https://h/a?d,e>; rel=\"next\""), "d,e");
  EXPECT_EQ(next_query("<https://h/a?b>; rel=\"last\""), "");
  EXPECT_EQ(
      next_query("</style.css>; rel=preload, <?c=1>; title=x; Rel=\"Last Next\", <?c=1>; rel=next"),
      "c=1");
  for (const char* header : {"<unclosed", "<https://h/a>; rel=next", "<https://h/a?>; rel=next",
                             "<?c=1#x>; rel=next", "<?c=1 x>; rel=next", "<?c=1\xc3\xbc>; rel=next",
                             "<?c=1>; rel=next, <?c=2>; rel=next", "<?c=1>; rel=\"next"}) {
    EXPECT_EQ(code_of([&] { (void)next_query(header); }), ErrorCode::corrupt) << header;
  }
}

}  // namespace
}  // namespace tessera::hub
