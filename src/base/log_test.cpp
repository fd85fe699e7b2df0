#include "base/log.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(Log, OnlyTheHookHears) {
  log(LogLevel::warning, "nobody listens");
  std::string heard;
  set_log([&heard](LogLevel level, std::string_view message) {
    heard += (level == LogLevel::info ? "info " : "? ") + std::string(message);
  });
  log(LogLevel::info, "one");
  set_log({});
  log(LogLevel::info, "two");
  EXPECT_EQ(heard, "info one");
}

}  // namespace
}  // namespace tessera
