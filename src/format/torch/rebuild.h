// The names that torch.save gives things, and the geometry that reader and writer both check.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::torch_file {

inline constexpr std::string_view kUntyped = "UntypedStorage";
inline constexpr std::size_t kMaxDimensions = 64;      // as torch
inline constexpr std::uint64_t kPickleCap = 1U << 30;  // bytes of a pickle that are read

[[noreturn]] void corrupt(std::string what);

// Storage classes without a dtype of ours (UntypedStorage, the quantized ones) are kept by name;
// `dtype` then only gives the size of what they count.
struct StorageClass {
  DType dtype = DType::uint8;
  std::string kept_name;  // empty: the class is the dtype's own
};
// Throws `unsupported` for a class that torch does not have.
[[nodiscard]] StorageClass storage_class(std::string_view name);
[[nodiscard]] bool is_storage_class(std::string_view name) noexcept;  // that it has

// The class that a tensor of `dtype` is saved with.
[[nodiscard]] std::string_view class_name(DType dtype);
// Whether that is a class of its own, and not bytes that the tensor says the type of.
[[nodiscard]] bool has_storage_class(DType dtype);
[[nodiscard]] std::string_view class_name(const Storage& storage);
// Whether `value` is a storage itself, and not a tensor in one.
[[nodiscard]] bool is_bare_storage(const Value& value);
// The class as the pickle names it.
[[nodiscard]] Value class_global(std::string_view name);

// torch's strides of a contiguous tensor: sizes of 0 count as 1.
[[nodiscard]] Shape torch_strides(const Shape& shape);

// Throws `corrupt` unless a view of this geometry (in elements) lies inside `storage_size` bytes.
struct View {
  std::int64_t offset = 0;
  const Shape& shape;
  const Shape& strides;
};
void require_inside(const View& view, DType dtype, std::uint64_t storage_size);

// What the pickles of torch.save mean: storages by persistent ids, tensors by calls of rebuilders.

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
