#include "storage/http/link_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera {
namespace {

using testing::ElementsAre;

// The targets that a header calls the next ones.
std::vector<std::string> next_in(std::string_view header) {
  std::vector<std::string> found;
  for (const WebLink& link : links_in(header))
    for (const std::string& relation : link.relations)
      if (relation == "next") found.push_back(link.target);
  return found;
}

TEST(LinkHeader, ALinkIsWrittenInManyWays) {
  for (const char* header :
       {"<u>; rel=\"next\"", "<u>; rel=next", "<u>;rel=next", "<u> ; REL = \"NEXT\"",
        "<u>; rel=\"prefetch\tnext\"", "<u>; rel=\"\\next\"", "<u>; title=\"a, <b>; c\"; rel=next",
        "<u>; title=\"a\\\"; rel=last\"; rel=next", "<u>; crossorigin; rel=next; rel=last",
        "<u>; type=text/html; title*=UTF-8''%3C; rel=next;", "</a,b;c>; rel=preload, <u>; rel=next",
        "<u>; rel=next, </a>; rel=\"next-page prev\"", ", ,<u>; rel=next; ,", "<u>;; rel=next"}) {
    EXPECT_THAT(next_in(header), ElementsAre("u")) << header;
  }
  EXPECT_THAT(next_in("<a?b,c>; rel=next, <>; rel=next"), ElementsAre("a?b,c", ""));
}

TEST(LinkHeader, OtherLinksAreNotNext) {
  for (const char* header :
       {"", " ", ",", "<u>", "<u>; rel", "<u>; rel=", "<u>; rel=\"\"", "<u>; rel=last; rel=next",
        "<u>; title=\"rel=next\"", "<u>; rev=next", "<u>; rel=\"http://h/next\""}) {
    EXPECT_THAT(next_in(header), ElementsAre()) << header;
  }
}

TEST(LinkHeader, WhatIsNoListOfLinksIsCorrupt) {
  for (const char* header :
       {"u", "u; rel=next", "<u", "<u; rel=next", "<u> rel=next", "<u>; rel=\"next",
        "<u>; rel=\"next\\", "<u>; rel=\"next\\\"", "<u>; rel=next last", "<u>; rel=\"next\"last",
        "<u>; =next", "<u>; rel=next <v>; rel=last", "<u>; rel=next, v"}) {
    EXPECT_EQ(code_of([&] { (void)links_in(header); }), ErrorCode::corrupt) << header;
  }
}

}  // namespace
}  // namespace tessera
