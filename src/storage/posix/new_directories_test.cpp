#include "storage/posix/new_directories.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "storage/posix/lock.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

TEST(NewDirectories, WhatWasNotThereGoesUnlessSomethingIsInIt) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/b/c";
  {
    const NewDirectories made(path + "/");
    fs::create_directories(path);
  }
  EXPECT_TRUE(directory.empty());
  {
    const NewDirectories made(path);
    fs::create_directories(path);
    std::ofstream(directory.path() + "/a/kept") << "x";
  }
  EXPECT_TRUE(fs::exists(directory.path() + "/a/kept"));
  EXPECT_FALSE(fs::exists(directory.path() + "/a/b"));
  {
    NewDirectories made(path);
    fs::create_directories(path);
    made.keep();
  }
  EXPECT_TRUE(fs::exists(path));
}

TEST(LockedDirectory, ASecondOneIsAConflict) {
  const TemporaryDirectory directory;
  {
    const LockedFd lock = locked_directory(directory.path());
    EXPECT_EQ(code_of([&] { (void)locked_directory(directory.path()); }), ErrorCode::conflict);
    remove_abandoned(directory.path());
    EXPECT_TRUE(fs::exists(directory.path()));
  }
  const LockedFd again = locked_directory(directory.path());
  EXPECT_EQ(code_of([&] { (void)locked_directory(directory.path() + "/none"); }),
            ErrorCode::not_found);
}

}  // namespace
}  // namespace tessera
