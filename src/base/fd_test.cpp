#include "base/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

Fd open_null() {
  return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

TEST(Fd, ClosesWhatItOwns) {
  int number = -1;
  {
    const Fd fd = open_null();
    number = fd.get();
    ASSERT_TRUE(fd);
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));
  EXPECT_FALSE(Fd());
}

TEST(Fd, AMoveHandsOverTheDescriptor) {
  Fd first = open_null();
  const int number = first.get();
  Fd second = std::move(first);
  EXPECT_EQ(second.get(), number);
  const int replaced = number;
  second = open_null();
  EXPECT_FALSE(is_open(replaced));
  EXPECT_TRUE(is_open(second.get()));
}

}  // namespace
}  // namespace tessera
