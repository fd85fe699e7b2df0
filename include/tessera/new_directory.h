// A directory of a store that appears whole under its name, or not at all.
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] tessera {

// Made by Store::new_directory. Without commit it goes, with all that is in it.
class NewDirectory {
 public:
  NewDirectory() = default;
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  virtual ~NewDirectory() = default;

  // What it is called in the store until its commit: "NAME-tmp-" and an attempt. Write here.
  [[nodiscard]] virtual const std::string& working() const = 0;
  // Gives it its name in one step, durably; its objects must be durable. What had the name before
  // stays whole until then, and is removed afterwards. At most once.
  virtual void commit() = 0;
};

}  // namespace tessera
