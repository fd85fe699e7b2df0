// What the pickles of torch.save mean: storages by persistent ids, tensors by calls of rebuilders.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>

#include "format/torch/names.h"
#include "tessera/value.h"

namespace tessera::torch_file {

// ("storage", class, key, location, number of elements), in old streams with a view as sixth.
struct StorageId {
  StorageClass kept;
  std::string key;
  std::string location;
  std::int64_t count = 0;  // elements; may be negative in a damaged file
};
// Throws `corrupt` for anything but a tuple of `parts` that begins like this.
[[nodiscard]] StorageId parse_storage_id(const Value& id, std::size_t parts);

// The leaf that stands for a storage: `storage` says where the bytes are, `id` what they are.
[[nodiscard]] Value bare_storage(StorageId id, Storage storage);
[[nodiscard]] bool is_of_class(const Storage& storage, const StorageClass& kept);
// Whether `items`, which are not fewer, begin with these kinds.
[[nodiscard]] bool begin_with(const Value::List& items, std::initializer_list<Value::Kind> kinds);
// Throws `corrupt` when a later id describes the storage in another way.
void require_same_storage(const Value& bare, const StorageId& id);

// Storage::id_strings of one file: one tuple for all storages that share the strings. A location
// with a number is made anew in Python each time, and is nobody else's.
class IdStrings {
 public:
  [[nodiscard]] std::shared_ptr<const Value> of(const Value& id);

 private:
  std::shared_ptr<const Value> latest_;
};

// Whether `callable(*arguments)` makes a tensor or parameter that a leaf can say; then it does.
// Throws `corrupt` for a tensor that does not fit its storage.
[[nodiscard]] bool rebuild_tensor(const Value& callable, const Value& arguments, Value& result);

}  // namespace tessera::torch_file
