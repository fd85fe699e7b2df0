#include "storage/posix/work_directory.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/error.h"

namespace tessera {
namespace {

TEST(WorkDirectory, IsLeftForTheNextOne) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/.x.resume";
  {
    const WorkDirectory work(path);
    ASSERT_EQ(::write(work.journal(), "one\n", 4), 4);
  }
  WorkDirectory work(path);
  char text[4] = {};
  EXPECT_EQ(::pread(work.journal(), text, 4, 0), 4);
  EXPECT_EQ(std::string(text, 4), "one\n");
  std::filesystem::create_directories(work.content() + "/b");
  work.remove();
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/a"));
}

TEST(WorkDirectory, OneWorksAtATime) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/.x.resume";
  {
    const WorkDirectory work(path);
    EXPECT_EQ(code_of([&] { const WorkDirectory other(path); }), ErrorCode::conflict);
  }
  EXPECT_NO_THROW(WorkDirectory{path});
}

TEST(WorkDirectory, WhatIsNotADirectoryOfOursStays) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/.x.resume";
  std::ofstream(path) << "mine";
  EXPECT_EQ(code_of([&] { const WorkDirectory work(path); }), ErrorCode::unsafe);
  std::filesystem::remove(path);
  std::filesystem::create_directory(directory.path() + "/other");
  std::filesystem::create_symlink("other", path);
  EXPECT_EQ(code_of([&] { const WorkDirectory work(path); }), ErrorCode::unsafe);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/other"));
}

TEST(WorkDirectory, WhatIsAnothersStays) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/.x.resume";
  std::filesystem::create_directory(path);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_EQ(code_of([&] { const WorkDirectory work(path); }), ErrorCode::unsafe);
  EXPECT_TRUE(std::filesystem::is_empty(path));
}

}  // namespace
}  // namespace tessera
