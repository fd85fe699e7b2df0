// What belongs to a checkpoint of those files that lie in its directory. The only place that says
// so, for conversions, saves and copies that replace one.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// Tells the checkpoint's own files, of whatever kind it is: another one that takes its place
// replaces them, and would be mixed with them otherwise. Whatever else lies there (notes, a
// tokenizer, results, an adapter's weights beside a model) is somebody's, and
// stays. By names and by indices of safetensors alone, so that it can be told of a damaged
// checkpoint too.
class Belonging {
 public:
  // `store`: at its root the checkpoint is, or was.
  explicit Belonging(const Store& store);
  Belonging(const Store& store, const std::vector<ObjectInfo>& files);  // that were listed already
  // `name`: relative to the checkpoint's directory.
  bool operator()(std::string_view name) const;

 private:
  bool all_safetensors_ = false;  // without an index, and beside nothing else: they are one
  std::set<std::string, std::less<>> in_index_;  // and the index itself
};

// Throws `io` if a directory in which a checkpoint's files may be is closed to us: Store::list
// passes over what is.
void require_own_open(const Store& store);

// Whether one of these files, by its name, is a checkpoint's.
[[nodiscard]] bool holds_checkpoint(const std::vector<ObjectInfo>& files);

}  // namespace tessera
