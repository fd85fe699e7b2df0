#include "storage/posix/new_directories.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

namespace tessera {

NewDirectories::NewDirectories(const std::string& path) {
  std::filesystem::path directory(path);
  if (!directory.has_filename()) directory = directory.parent_path();
  struct stat status {};
  while (!directory.empty() && ::lstat(directory.c_str(), &status) != 0) {
    missing_.push_back(directory.string());
    const std::filesystem::path parent = directory.parent_path();
    if (parent == directory) break;
    directory = parent;
  }
}

NewDirectories::~NewDirectories() {
  if (!made_here_) return;
  for (const std::string& directory : missing_) ::rmdir(directory.c_str());
}

}  // namespace tessera
