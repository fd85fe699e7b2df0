#include "storage/posix/kept_file.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "conformance/errors.h"
#include "conformance/store_conformance.h"
#include "conformance/temporary_directory.h"

namespace tessera {
namespace {

std::string content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(KeptFile, WhatWasWrittenStaysWithoutCommit) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/x";
  KeptFile(path, 0).write_at(0, bytes_of("abcdef"));
  EXPECT_EQ(content(path), "abcdef");
  KeptFile file(path, 0);
  file.keep_at(0, bytes_of("abcd"));
  file.write_at(2, bytes_of("X"));
  file.commit();
  EXPECT_EQ(content(path), "abXd");  // what nobody vouched for is cut off
}

// A backup made of hard links keeps what it has.
TEST(KeptFile, AFileWithOtherNamesIsGivenUp) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  KeptFile(path, 0).write_at(0, bytes_of("abc"));
  std::filesystem::create_hard_link(path, directory.path() + "/backup");
  KeptFile file(path, 0);
  file.write_at(0, bytes_of("X"));
  file.commit();
  EXPECT_EQ(content(path), "X");
  EXPECT_EQ(content(directory.path() + "/backup"), "abc");
}

TEST(KeptFile, ALinkIsNotFollowed) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() + "/mine") << "mine";
  std::filesystem::create_symlink("mine", directory.path() + "/x");
  KeptFile file(directory.path() + "/x", 0);
  file.write_at(0, bytes_of("X"));
  file.commit();
  EXPECT_EQ(content(directory.path() + "/mine"), "mine");
}

}  // namespace
}  // namespace tessera
