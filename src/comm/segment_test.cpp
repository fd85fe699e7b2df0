#include "comm/segment.h"

#include <csignal>

#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "testing.h"

namespace tessera::same_host {
namespace {

TEST(ProcessId, TravelsAsText) {
  const auto self = this_process();
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_EQ(process_from_text(to_text(self)), self);
  EXPECT_EQ(code_of([] { static_cast<void>(process_from_text("a 1")); }), ErrorCode::corrupt);
  EXPECT_EQ(code_of([] { static_cast<void>(process_from_text("a -1 1")); }), ErrorCode::corrupt);
}

TEST(Watch, SeesAnEndAlthoughNobodyHasCollectedIt) {
  const auto pid = run_process([] {
    ::pause();
    return 0;
  });
  auto child = this_process();
  child.pid = pid;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string word;
  for (int field = 1; field <= 22; ++field) stat >> word;
  child.started = std::stoull(word);
  const Watch watch(child);
  EXPECT_TRUE(watch.alive());
  ::kill(pid, SIGKILL);
  siginfo_t info;
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);  // a zombie from here on
  EXPECT_FALSE(watch.alive());
  EXPECT_EQ(code_of([&] { Watch late(child); }), ErrorCode::peer_failed);
  end_of(pid);
  EXPECT_FALSE(watch.alive());
  EXPECT_EQ(code_of([&] { Watch late(child); }), ErrorCode::peer_failed);
}

TEST(Watch, IsNotFooledByANumberThatCameBack) {
  auto other = this_process();
  --other.started;
  EXPECT_EQ(code_of([&] { Watch watch(other); }), ErrorCode::peer_failed);
}

}  // namespace
}  // namespace tessera::same_host
