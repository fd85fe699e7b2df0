#include "comm/message.h"

#include <gtest/gtest.h>

#include "comm/confer.h"
#include "conformance/errors.h"

namespace tessera {
namespace {

enum class Colour : std::uint8_t { red, green };
constexpr Colour last_of(Colour) {
  return Colour::green;
}

struct Point {
  std::int32_t x = 0;
  double y = 0;
  bool operator==(const Point&) const = default;
};
auto fields(FieldsOf<Point> auto& point) {
  return std::tie(point.x, point.y);
}

struct Drawing {
  std::string name;
  Colour colour = Colour::red;
  bool is_closed = false;
  std::vector<Point> points;
  std::map<std::string, std::vector<std::uint64_t>> numbers;
  std::optional<Point> centre;
  std::optional<Point> none;
  std::pair<DType, Bytes> data;
  bool operator==(const Drawing&) const = default;
};
auto fields(FieldsOf<Drawing> auto& drawing) {
  return std::tie(drawing.name, drawing.colour, drawing.is_closed, drawing.points, drawing.numbers,
                  drawing.centre, drawing.none, drawing.data);
}

const Drawing& drawing() {
  static const Drawing made = {
      "a name",
      Colour::green,
      true,
      {{-1, 0.5}, {2, -3}},
      {{"one", {1}}, {"none", {}}, {"large", {~std::uint64_t{0}, 2}}},
      Point{7, 8},
      std::nullopt,
      {DType::bfloat16, {std::byte{3}}},
  };
  return made;
}

TEST(Message, FieldsArriveAsTheyWere) {
  EXPECT_EQ(from_message<Drawing>(to_message(drawing())), drawing());
  EXPECT_EQ(from_message<Drawing>(to_message(Drawing())), Drawing());
}

TEST(Message, ErrorsAreFields) {
  using Faults = std::vector<std::optional<Error>>;
  const Faults sent = {std::nullopt,
                       Error(ErrorCode::incomplete, "a file is missing").at_path("p")};
  const auto got = from_message<Faults>(to_message(sent));
  ASSERT_EQ(got.size(), 2U);
  EXPECT_FALSE(got[0]);
  EXPECT_EQ(got[1]->code(), ErrorCode::incomplete);
  EXPECT_EQ(got[1]->path(), "p");
}

TEST(Message, MessagesSideBySideAreReadOneAfterAnother) {
  const Bytes both = side_by_side(to_message(Point{1, 2}), to_message(Point{3, 4}));
  EXPECT_EQ(all_from_message<Point>(both), (std::vector<Point>{{1, 2}, {3, 4}}));
  EXPECT_TRUE(all_from_message<Point>(Bytes()).empty());
}

TEST(Message, AnyOtherLengthIsRefused) {
  Bytes message = to_message(drawing());
  for (std::size_t size = 0; size < message.size(); ++size) {
    EXPECT_EQ(code_of([&] { (void)from_message<Drawing>(std::span(message).first(size)); }),
              ErrorCode::corrupt)
        << size;
  }
  message.push_back(std::byte{0});
  EXPECT_EQ(code_of([&] { (void)from_message<Drawing>(message); }), ErrorCode::corrupt);
}

TEST(Message, AnEnumThatIsNoneIsRefused) {
  const Bytes two{std::byte{2}};
  EXPECT_EQ(code_of([&] { (void)from_message<Colour>(two); }), ErrorCode::corrupt);
  EXPECT_EQ(code_of([&] { (void)from_message<bool>(two); }), ErrorCode::corrupt);
  EXPECT_EQ(from_message<DType>(two), DType::float16);
  const Bytes beyond{static_cast<std::byte>(dtype_table().size())};
  EXPECT_EQ(code_of([&] { (void)from_message<DType>(beyond); }), ErrorCode::corrupt);
}

// Before anything is allocated for them.
TEST(Message, MoreElementsThanBytesAreRefused) {
  const Bytes many = MessageWriter().count(std::uint64_t{1} << 60).number(std::uint64_t{0}).take();
  EXPECT_EQ(code_of([&] { (void)from_message<std::vector<Point>>(many); }), ErrorCode::corrupt);
  using Texts = std::map<std::string, std::string>;
  EXPECT_EQ(code_of([&] { (void)from_message<Texts>(many); }), ErrorCode::corrupt);
}

TEST(Message, CombiningJoinsWhatMessagesCarry) {
  const Combine combine = combine_by<Point>([](Point& all, const Point& more) { all.x += more.x; });
  EXPECT_EQ(from_message<Point>(combine(to_message(Point{1, 2}), to_message(Point{3, 4}))),
            (Point{4, 2}));
}

}  // namespace
}  // namespace tessera
