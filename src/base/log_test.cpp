#include "base/log.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "tessera/environment.h"

namespace tessera {
namespace {

TEST(Log, AHookHearsEverything) {
  std::string heard;
  set_log([&heard](LogLevel level, std::string_view message) {
    heard += (level == LogLevel::info ? "info " : "warning ") + std::string(message) + ";";
  });
  log(LogLevel::info, "one");
  log_of_all(LogLevel::warning, "two");
  log_of_all(LogLevel::warning, "two");
  set_log({});
  log(LogLevel::info, "three");
  EXPECT_EQ(heard, "info one;warning two;warning two;");
}

TEST(Log, WithoutAHookWarningsAreWrittenOnce) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) log(LogLevel::warning, "a warning of this test");
  log(LogLevel::info, "a note of this test");
  log(LogLevel::warning, "another warning of this test");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "tessera: warning: a warning of this test\n"
            "tessera: warning: another warning of this test\n");
}

TEST(Log, WhatAllRanksSayRankZeroWrites) {
  const auto written = [](const char* rank, const std::string& text) {
    ::setenv("RANK", rank, 1);
    copy_environment();
    testing::internal::CaptureStderr();
    log_of_all(LogLevel::warning, text + " of all");
    log(LogLevel::warning, text + " of its own");
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(written("0", "first"),
            "tessera: warning: first of all\ntessera: warning: first of its own\n");
  EXPECT_EQ(written("3", "second"), "tessera: warning: second of its own\n");
  ::unsetenv("RANK");
  copy_environment();
}

}  // namespace
}  // namespace tessera
