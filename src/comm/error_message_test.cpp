#include "comm/error_message.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(ErrorMessage, KeepsWhatTheErrorKnows) {
  const Error sent =
      Error(ErrorCode::out_of_space, "no room").at_path("a/b").at_key("w").at_offset(0);
  const Error got = decode_error(encode_error(sent));
  EXPECT_EQ(got.code(), ErrorCode::out_of_space);
  EXPECT_EQ(got.message(), "no room");
  EXPECT_EQ(got.path(), "a/b");
  EXPECT_EQ(got.key(), "w");
  EXPECT_EQ(got.offset(), 0U);
  EXPECT_FALSE(decode_error(encode_error(Error(ErrorCode::io, ""))).offset());
  EXPECT_FALSE(got.is_no_checkpoint());
  const Error none = Error(ErrorCode::not_found, "none").as_no_checkpoint();
  EXPECT_TRUE(decode_error(encode_error(none)).is_no_checkpoint());
}

TEST(ErrorMessage, KeepsThePeers) {
  const Error sent = Error::from_peers({{1, Error(ErrorCode::io, "x").at_path("p")},
                                        {5, Error(ErrorCode::corrupt, "y").at_offset(3)}},
                                       6);
  const Error got = decode_error(encode_error(sent));
  EXPECT_STREQ(got.what(), sent.what());
  EXPECT_EQ(got.peers().at(5).offset(), 3U);
}

TEST(ErrorMessage, EveryCutIsRefused) {
  const Bytes whole =
      encode_error(Error::from_peers({{1, Error(ErrorCode::io, "text").at_path("path")}}, 2));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW((void)decode_error(std::span(whole).first(size)), Error) << size;
  }
  Bytes longer = whole;
  longer.push_back({});
  EXPECT_THROW((void)decode_error(longer), Error);
  Bytes unknown = whole;
  unknown[0] = std::byte{200};
  EXPECT_THROW((void)decode_error(unknown), Error);
}

}  // namespace
}  // namespace tessera
