#include "value/known.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "value/integer.h"
#include "value/meaning.h"
#include "value/render.h"

namespace tessera {
namespace {

Value call_of(const char* module, const char* name, Value::List arguments) {
  return Value::object(
      {.callable = Value::global(module, name), .arguments = Value::tuple(std::move(arguments))});
}

Value raw(const std::vector<int>& bytes) {
  std::vector<std::byte> made;
  made.reserve(bytes.size());
  for (const int byte : bytes) made.push_back(static_cast<std::byte>(byte));
  return Value::bytes(std::move(made));
}

Value delta(std::int64_t days, std::int64_t seconds, std::int64_t micros) {
  return call_of("datetime", "timedelta", {days, seconds, micros});
}

Value uuid(Value number) {
  return Value::object({.callable = Value::global("uuid", "UUID"),
                        .arguments = Value::tuple({}),
                        .by_new = true,
                        .state = Value::dict({{"int", std::move(number)}})});
}

TEST(Known, BuiltinsAndContainers) {
  EXPECT_EQ(render(call_of("builtins", "range", {0, 3, 1})), "range(0, 3)");
  EXPECT_EQ(render(call_of("builtins", "range", {9, 0, -2})), "range(9, 0, -2)");
  EXPECT_EQ(render(call_of("builtins", "slice", {1, Value(), "a"})), "slice(1, None, 'a')");
  EXPECT_EQ(render(Value::global("builtins", "Ellipsis")), "Ellipsis");
  EXPECT_EQ(render(call_of("collections", "Counter", {Value::dict({{"b", 1}, {"a", 2}})})),
            "Counter({'a': 2, 'b': 1})");
  EXPECT_EQ(render(call_of("collections", "Counter", {Value::dict({})})), "Counter()");
  const auto counter = [](std::vector<Value::Pair> counts) {
    return render(call_of("collections", "Counter", {Value::dict(std::move(counts))}));
  };
  EXPECT_EQ(counter({{"a", 1}, {"b", 1.5}, {"c", true}, {"d", -INFINITY}}),
            "Counter({'b': 1.5, 'a': 1, 'c': True, 'd': -inf})");
  // 2^53 and 2^53 + 1, of which a float has but one, and past all integers of 64 bits.
  EXPECT_EQ(counter({{"a", 9007199254740992.0}, {"b", 9007199254740993}, {"c", 1e300}}),
            "Counter({'c': 1e+300, 'b': 9007199254740993, 'a': 9007199254740992.0})");
  EXPECT_EQ(counter({{"a", INT64_MAX}, {"b", 9223372036854775808.0}, {"c", INT64_MIN}}),
            "Counter({'b': 9.223372036854776e+18, 'a': 9223372036854775807, "
            "'c': -9223372036854775808})");
  EXPECT_EQ(counter({{"a", 1}, {"b", Value()}, {"c", 2}}), "Counter({'a': 1, 'b': None, 'c': 2})");
  EXPECT_EQ(counter({{"a", "x"}}), "Counter({'a': 'x'})");
  Object deque{.callable = Value::global("collections", "deque"),
               .arguments = Value::tuple({Value::tuple({}), 3}),
               .list_items = {1, Value::list({2})}};
  EXPECT_EQ(render(Value::object(deque)), "deque([1, [2]], maxlen=3)");
  deque.arguments = Value::tuple({});
  EXPECT_EQ(render(Value::object(deque)), "deque([1, [2]])");
  deque.arguments = Value::tuple({Value::tuple({}), 1});
  EXPECT_FALSE(known_value(Value::object(deque)));
}

TEST(Known, DatesAndTimes) {
  const Value moment = raw({7, 232, 1, 2, 3, 4, 0, 0, 0, 0});
  const auto datetime = [](Value::List arguments) {
    return render(call_of("datetime", "datetime", std::move(arguments)));
  };
  const auto zone = [](Value::List arguments) {
    return call_of("datetime", "timezone", std::move(arguments));
  };
  EXPECT_EQ(datetime({moment}), "datetime.datetime(2024, 1, 2, 3, 4)");
  EXPECT_EQ(datetime({raw({7, 232, 2, 29, 3, 4, 5, 1, 0, 0})}),
            "datetime.datetime(2024, 2, 29, 3, 4, 5, 65536)");
  EXPECT_EQ(datetime({raw({7, 232, 0x81, 2, 3, 4, 0, 0, 0, 1}), zone({delta(0, 0, 0)})}),
            "datetime.datetime(2024, 1, 2, 3, 4, 0, 1, fold=1, tzinfo=datetime.timezone.utc)");
  EXPECT_EQ(render(zone({delta(-1, 3600, 0), "x"})),
            "datetime.timezone(datetime.timedelta(days=-1, seconds=3600), 'x')");
  EXPECT_EQ(render(call_of("datetime", "date", {raw({7, 232, 1, 2})})),
            "datetime.date(2024, 1, 2)");
  EXPECT_EQ(render(call_of("datetime", "time", {raw({0x81, 2, 0, 0, 0, 0})})),
            "datetime.time(1, 2, fold=1)");
  EXPECT_EQ(render(delta(0, 0, 0)), "datetime.timedelta(0)");
  EXPECT_EQ(render(delta(1, 0, 3)), "datetime.timedelta(days=1, microseconds=3)");
}

TEST(Known, NumbersAndNames) {
  EXPECT_EQ(render(call_of("decimal", "Decimal", {"-1.5E+3"})), "Decimal('-1.5E+3')");
  EXPECT_EQ(render(call_of("fractions", "Fraction", {-1, 3})), "Fraction(-1, 3)");
  EXPECT_EQ(render(call_of("fractions", "Fraction", {"1/3"})), "Fraction(1, 3)");
  EXPECT_EQ(render(uuid(5)), "UUID('00000000-0000-0000-0000-000000000005')");
  EXPECT_EQ(
      render(uuid(Value::integer(integer_from_decimal("340282366920938463463374607431768211455")))),
      "UUID('ffffffff-ffff-ffff-ffff-ffffffffffff')");
  EXPECT_EQ(render(call_of("torch", "device", {"cpu"})), "device(type='cpu')");
  EXPECT_EQ(render(call_of("torch", "device", {"cuda", 1})), "device(type='cuda', index=1)");
  EXPECT_EQ(render(Value::global("torch", "float32")), "torch.float32");
  for (const char* name : {"float32", "quint4x2", "uint3", "bits1x8"})
    EXPECT_EQ(known_value(Value::global("torch", name))->type, "torch.dtype") << name;
  EXPECT_FALSE(known_value(Value::global("torch", "load")));
  const auto path = [](const char* kind, Value::List parts) {
    return render(call_of("pathlib", kind, std::move(parts)));
  };
  EXPECT_EQ(path("PosixPath", {"/", "a", "b"}), "PosixPath('/a/b')");
  EXPECT_EQ(path("PosixPath", {"a", "./b//c", "/d/"}), "PosixPath('/d')");
  EXPECT_EQ(path("PurePosixPath", {"//", "a"}), "PurePosixPath('//a')");
  EXPECT_EQ(path("PosixPath", {}), "PosixPath('.')");
  EXPECT_EQ(path("PureWindowsPath", {"c:\\", "a"}), "PureWindowsPath('c:/a')");
  EXPECT_EQ(path("PureWindowsPath", {"c:\\"}), "PureWindowsPath('c:/')");
  EXPECT_EQ(path("PureWindowsPath", {"C:", "x", "y"}), "PureWindowsPath('C:x/y')");
  EXPECT_EQ(path("PureWindowsPath", {"C:x\\y", "z"}), "PureWindowsPath('C:x/y/z')");
  EXPECT_EQ(path("PureWindowsPath", {"C:"}), "PureWindowsPath('C:')");
  EXPECT_EQ(path("PureWindowsPath", {"C:\\", "x"}), "PureWindowsPath('C:/x')");
  EXPECT_EQ(path("PureWindowsPath", {"x", "y\\z"}), "PureWindowsPath('x/y/z')");
  EXPECT_EQ(path("PureWindowsPath", {}), "PureWindowsPath('.')");
}

// What its class would not make a value of.
TEST(Known, WrongArgumentsAreNone) {
  const std::vector<Value> wrong{
      call_of("builtins", "range", {0, 3, 0}),
      call_of("builtins", "range", {0, 3}),
      call_of("builtins", "range", {0, 3.0, 1}),
      call_of("builtins", "slice", {0}),
      Value::global("builtins", "range"),
      call_of("collections", "Counter", {1}),
      call_of("collections", "Counter", {}),
      // In what order Python has these nobody else knows.
      call_of("collections", "Counter", {Value::dict({{"a", NAN}, {"b", 1}})}),
      call_of("collections", "Counter", {Value::dict({{"a", "x"}, {"b", "y"}})}),
      call_of("collections", "deque", {Value::tuple({}), -1}),
      call_of("collections", "deque", {"abc"}),
      call_of("datetime", "date", {raw({7, 232, 13, 2})}),
      call_of("datetime", "date", {raw({7, 231, 2, 29})}),
      call_of("datetime", "date", {raw({0, 0, 1, 1})}),
      call_of("datetime", "date", {2024, 1, 2}),
      call_of("datetime", "datetime", {raw({7, 232, 1, 2, 24, 0, 0, 0, 0, 0})}),
      call_of("datetime", "datetime", {raw({7, 232, 1, 2, 0, 0, 0, 255, 0, 0})}),
      call_of("datetime", "datetime", {raw({7, 232, 1, 2, 0, 0, 0, 0, 0, 0}), "UTC"}),
      call_of("datetime", "time", {raw({1, 60, 0, 0, 0, 0})}),
      call_of("datetime", "time", {raw({1})}),
      delta(1'000'000'000, 0, 0),
      delta(0, 86400, 0),
      delta(0, 0, -1),
      call_of("datetime", "timezone", {delta(1, 0, 0)}),
      call_of("datetime", "timezone", {delta(-1, 0, 0)}),
      call_of("datetime", "timezone", {delta(0, 1, 0), 1}),
      call_of("decimal", "Decimal", {"x"}),
      call_of("decimal", "Decimal", {"1e5"}),
      call_of("decimal", "Decimal", {""}),
      call_of("decimal", "Decimal", {"1.E+5"}),
      call_of("decimal", "Decimal", {1}),
      call_of("fractions", "Fraction", {1, 0}),
      call_of("fractions", "Fraction", {2, 4}),
      call_of("fractions", "Fraction", {"1/"}),
      call_of("fractions", "Fraction", {INT64_MIN, 3}),
      uuid(-1),
      uuid("5"),
      uuid(Value::integer(integer_from_decimal("340282366920938463463374607431768211456"))),
      call_of("uuid", "UUID", {"00000000-0000-0000-0000-000000000005"}),
      call_of("pathlib", "PosixPath", {1}),
      call_of("pathlib", "PureWindowsPath", {"a", "c:\\b"}),
      call_of("pathlib", "PureWindowsPath", {"\\\\host\\share\\", "b"}),
      call_of("pathlib", "PureWindowsPath", {"c:", "\\b"}),
      call_of("pathlib", "PureWindowsPath", {"c:a:b"}),
      call_of("pathlib", "PureWindowsPath", {"1:b"}),
      call_of("torch", "device", {"cuda:0", 1, 2}),
      call_of("torch", "device", {"a\nb"}),
      call_of("torch", "device", {"cuda", 1000}),
      call_of("torch", "Size", {1}),
      call_of("torch", "Size", {Value::tuple({"a"})}),
      call_of("numpy", "dtype", {"f4"}),
      call_of("os", "system", {"x"}),
  };
  for (const Value& value : wrong) EXPECT_FALSE(known_value(value)) << render(value);
}

// One meaning has one form, wherever it is.
TEST(Known, Meanings) {
  Object items{.callable = Value::global("collections", "deque"),
               .arguments = Value::tuple({}),
               .list_items = {1, 2}};
  const Value deque = Value::object(items);
  const Value same = call_of("collections", "deque", {Value::tuple({1, 2})});
  EXPECT_NE(deque, same);
  EXPECT_EQ(meaning_of(deque), meaning_of(same));
  const auto inside = [](const Value& value) {
    return Value::list({Value::dict({{Value::tuple({value}), Value::set({value})}}),
                        call_of("other", "Thing", {value})});
  };
  EXPECT_EQ(meaning_of(inside(deque)), meaning_of(inside(same)));
  const Value third = call_of("fractions", "Fraction", {1, 3});
  EXPECT_EQ(meaning_of(inside(third)),
            meaning_of(inside(call_of("fractions", "Fraction", {"1/3"}))));
  EXPECT_NE(meaning_of(third), meaning_of(call_of("fractions", "Fraction", {2, 3})));
  EXPECT_NE(meaning_of(third), meaning_of(Value("Fraction(1, 3)")));
  EXPECT_EQ(meaning_of(call_of("pathlib", "PosixPath", {"/", "a"})),
            meaning_of(call_of("pathlib._local", "PosixPath", {"/a"})));
}

}  // namespace
}  // namespace tessera
