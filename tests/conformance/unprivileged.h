// Somebody who is not root: permissions count.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace tessera {

// Root is another user while it lives. Nobody else changes.
class Unprivileged {
 public:
  static constexpr uid_t kUser = 12345;
  Unprivileged() : before_(::geteuid()) { EXPECT_TRUE(before_ != 0 || ::seteuid(kUser) == 0); }
  Unprivileged(const Unprivileged&) = delete;
  Unprivileged& operator=(const Unprivileged&) = delete;
  ~Unprivileged() { EXPECT_EQ(::seteuid(before_), 0); }

  // Before: makes that user the owner.
  static void give(const std::string& path) {
    EXPECT_TRUE(::geteuid() != 0 || ::chown(path.c_str(), kUser, kUser) == 0) << path;
  }

 private:
  const uid_t before_;
};

// A directory that nobody but root may read, while it lives.
class ClosedDirectory {
 public:
  explicit ClosedDirectory(std::string path) : path_(std::move(path)) {
    std::filesystem::create_directory(path_);
    std::filesystem::permissions(path_, std::filesystem::perms::none);
  }
  ClosedDirectory(const ClosedDirectory&) = delete;
  ClosedDirectory& operator=(const ClosedDirectory&) = delete;
  ~ClosedDirectory() { std::filesystem::permissions(path_, std::filesystem::perms::owner_all); }

 private:
  const std::string path_;
};

}  // namespace tessera
