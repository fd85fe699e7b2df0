// What the tests of faults around saves of every kind share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "five_kinds.h"

namespace tessera::testing {

namespace fs = std::filesystem;

// Calls `test` for each kind, with a path at which nothing is.
template <typename Test>
void for_each_kind(Test test) {
  for (const CheckpointKind kind : kFiveKinds) {
    SCOPED_TRACE(std::string(to_string(kind)));
    const TemporaryDirectory directory;
    test(kind, directory.path() + "/step4");
  }
}

inline void save_by(int ranks, CheckpointKind kind, const Location& where, int number,
                    bool overwrite = true) {
  run_ranks(ranks, [&](Group& group) {
    (void)save(training_state(group.rank(), ranks, number), where,
               options_for_kind(kind, overwrite), group);
  });
}

// What each of two ranks throws.
using RankErrors = std::map<int, Error>;
inline RankErrors errors_of(const std::function<void(Group&)>& body) {
  RankErrors errors;
  std::mutex mutex;
  run_ranks(2, [&](Group& group) {
    try {
      body(group);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      errors.emplace(group.rank(), error);
    }
  });
  return errors;
}

// The error of all ranks, which is one and the same.
inline Error one_error(const RankErrors& errors) {
  if (errors.size() != 2) throw std::runtime_error("not every rank has an error");
  EXPECT_STREQ(errors.at(0).what(), errors.at(1).what());
  return errors.at(0);
}

inline std::map<std::string, std::string> contents_of(const std::string& directory) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    std::ifstream file(entry.path());
    contents[entry.path().string()] =
        entry.is_directory() ? "" : std::string(std::istreambuf_iterator<char>(file), {});
  }
  return contents;
}

inline std::string parent_of(const std::string& path) {
  return fs::path(path).parent_path().string();
}

// A file with tensors that rank 1 alone has to read, whatever the order of the directory is.
inline std::string file_of_rank_one(CheckpointKind kind, const std::string& path) {
  if (kind == CheckpointKind::olmo_full) return path + "/model.pt";
  if (kind == CheckpointKind::olmo_local) return path + "/model/rank1.pt";
  if (kind == CheckpointKind::olmo_legacy) return path + "/rank1.pt";
  std::set<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (entry.path().filename().string().starts_with("__1_")) files.insert(entry.path().string());
  }
  EXPECT_FALSE(files.empty());
  return files.empty() ? path : *files.begin();
}

}  // namespace tessera::testing
