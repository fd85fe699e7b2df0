// A directory of a store that appears whole under its name, or not at all.
#pragma once

#include <functional>
#include <string>
#include <string_view>

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
  // Of a directory that had the name before: whether its object `name`, relative to it, goes.
  using IsReplaced = std::function<bool(std::string_view name)>;
  // Gives it its name in one step, durably; its objects must be durable. What had the name before
  // stays whole until then. Afterwards those of its objects are there too that `is_replaced` says
  // no of and that the new directory has no own of that name for; the others are removed. Null: all
  // are removed. At most once.
  virtual void commit(const IsReplaced& is_replaced) = 0;
  void commit() { commit(IsReplaced()); }
};

}  // namespace tessera
