// The classes of the module datetime, declared in known.h.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "value/known.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::int64_t kSecondsPerDay = 24 * 60 * 60;
constexpr std::int64_t kMostDays = 999'999'999;  // of a timedelta
constexpr int kFoldBit = 0x80;                   // of a month or an hour: the second of two equal

// What a date or time was pickled as: a byte a field, and two for the year.
struct Fields {
  std::vector<int> bytes;
  const Value* zone = nullptr;  // of a datetime or time that has one
};

std::optional<Fields> fields_of(const Object& object, std::size_t size, bool may_have_zone) {
  const auto* given = call_arguments(object);
  const std::size_t most = may_have_zone ? 2 : 1;
  if (given == nullptr || given->empty() || given->size() > most || !(*given)[0].is(Kind::bytes) ||
      (*given)[0].as_bytes().size() != size)
    return std::nullopt;
  Fields fields;
  for (const std::byte byte : (*given)[0].as_bytes())
    fields.bytes.push_back(std::to_integer<int>(byte));
  if (given->size() == 2) {
    const Value& zone = (*given)[1];
    if (!zone.is(Kind::object) || zone.as_object().name() != "datetime.timezone" ||
        !parts_of_timezone(zone.as_object()))
      return std::nullopt;
    fields.zone = &zone;
  }
  return fields;
}

struct Date {
  int year, month, day;
};

std::optional<Date> date_of(const std::vector<int>& bytes, int month) {
  constexpr std::array<int, 12> kDays{31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  const Date date{bytes[0] * 256 + bytes[1], month, bytes[3]};
  if (date.year < 1 || date.year > 9999 || month < 1 || month > 12) return std::nullopt;
  const bool is_leap = date.year % 4 == 0 && (date.year % 100 != 0 || date.year % 400 == 0);
  const int days = kDays[static_cast<std::size_t>(month - 1)] + (month == 2 && is_leap ? 1 : 0);
  return date.day < 1 || date.day > days ? std::nullopt : std::optional(date);
}

// "5, 6, 7, 8": of hours to microseconds, without zeros behind the minutes.
std::optional<std::string> clock_text(const std::vector<int>& bytes, std::size_t first, int hour) {
  const int minute = bytes[first + 1], second = bytes[first + 2];
  const int micro = (bytes[first + 3] * 256 + bytes[first + 4]) * 256 + bytes[first + 5];
  if (hour > 23 || minute > 59 || second > 59 || micro > 999'999) return std::nullopt;
  std::string text = std::to_string(hour) + ", " + std::to_string(minute);
  if (second > 0 || micro > 0) text += ", " + std::to_string(second);
  if (micro > 0) text += ", " + std::to_string(micro);
  return text;
}

std::string date_text(const Date& date) {
  return std::to_string(date.year) + ", " + std::to_string(date.month) + ", " +
         std::to_string(date.day);
}

// `text` without its last bracket, then what a datetime and a time may have besides.
KnownParts with_zone(const std::string& text, const Fields& fields, bool is_second) {
  const std::string start = text + (is_second ? ", fold=1" : "");
  if (fields.zone == nullptr) return written(start + ")");
  return written(start + ", tzinfo=", *fields.zone, ")");
}

struct Duration {
  std::int64_t days = 0, seconds = 0, micros = 0;
  bool operator==(const Duration&) const = default;
};

// Less than a day, to the east or to the west.
bool is_of_a_zone(const Duration& offset) {
  return offset.days == 0 || (offset.days == -1 && offset.seconds + offset.micros > 0);
}

std::optional<Duration> duration_of(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->size() != 3) return std::nullopt;
  const auto days = small_integer((*given)[0]), seconds = small_integer((*given)[1]),
             micros = small_integer((*given)[2]);
  if (!days || !seconds || !micros) return std::nullopt;
  // As a timedelta keeps them.
  if (*days < -kMostDays || *days > kMostDays || *seconds < 0 || *seconds >= kSecondsPerDay ||
      *micros < 0 || *micros > 999'999)
    return std::nullopt;
  return Duration{*days, *seconds, *micros};
}

}  // namespace

KnownParts parts_of_date(const Object& object) {
  const auto fields = fields_of(object, 4, false);
  const auto date = fields ? date_of(fields->bytes, fields->bytes[2]) : std::nullopt;
  if (!date) return std::nullopt;
  return written("datetime.date(" + date_text(*date) + ")");
}

KnownParts parts_of_datetime(const Object& object) {
  const auto fields = fields_of(object, 10, true);
  if (!fields) return std::nullopt;
  const int month = fields->bytes[2];
  const auto date = date_of(fields->bytes, month & ~kFoldBit);
  const auto clock = clock_text(fields->bytes, 4, fields->bytes[4]);
  if (!date || !clock) return std::nullopt;
  return with_zone("datetime.datetime(" + date_text(*date) + ", " + *clock, *fields,
                   (month & kFoldBit) != 0);
}

KnownParts parts_of_time(const Object& object) {
  const auto fields = fields_of(object, 6, true);
  if (!fields) return std::nullopt;
  const int hour = fields->bytes[0];
  const auto clock = clock_text(fields->bytes, 0, hour & ~kFoldBit);
  if (!clock) return std::nullopt;
  return with_zone("datetime.time(" + *clock, *fields, (hour & kFoldBit) != 0);
}

KnownParts parts_of_timedelta(const Object& object) {
  const auto duration = duration_of(object);
  if (!duration) return std::nullopt;
  std::string text;
  const auto add = [&text](const char* name, std::int64_t number) {
    if (number != 0) text += (text.empty() ? "" : ", ") + (name + std::to_string(number));
  };
  add("days=", duration->days);
  add("seconds=", duration->seconds);
  add("microseconds=", duration->micros);
  return written("datetime.timedelta(" + (text.empty() ? "0" : text) + ")");
}

KnownParts parts_of_timezone(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->empty() || given->size() > 2) return std::nullopt;
  const Value& offset = (*given)[0];
  if (!offset.is(Kind::object) || offset.as_object().name() != "datetime.timedelta")
    return std::nullopt;
  const auto duration = duration_of(offset.as_object());
  if (!duration || !is_of_a_zone(*duration)) return std::nullopt;
  if (given->size() == 2) {
    if (!(*given)[1].is(Kind::string)) return std::nullopt;
    return written("datetime.timezone(", offset, ", ", (*given)[1], ")");
  }
  if (*duration == Duration{}) return written("datetime.timezone.utc");
  return written("datetime.timezone(", offset, ")");
}

}  // namespace tessera
