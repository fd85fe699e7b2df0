#include "checkpointer/safetensors_tree.h"

#include <torch/torch.h>

#include <span>

#include "format/olmo/keys.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

Value value_of(const Value& tensor, bool is_pickled) {
  if (!is_pickled) return tensor;
  const auto bytes = tensor_of(tensor.as_tensor()).contiguous();
  return olmo::decode_value(
      {static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()});
}

Error conflict(const std::string& name) {
  return Error(ErrorCode::conflict, "two names of the file lead to one place").at_key(name);
}

// The dict under `key`, which is made if there is none.
Value dict_under(Value dict, const Value& key, const std::string& name) {
  if (const Value* found = dict.find_key(key)) {
    if (!found->is(Value::Kind::dict)) throw conflict(name);
    return *found;
  }
  auto made = Value::dict();
  dict.set_item(key, made);
  return made;
}

void put(const Value& root, const Value::List& keys, const Value& value, const std::string& name) {
  Value dict = root;
  for (const auto& key : std::span(keys).first(keys.size() - 1)) dict = dict_under(dict, key, name);
  if (dict.find_key(keys.back()) != nullptr) throw conflict(name);
  dict.set_item(keys.back(), value);
}

}  // namespace

Value nested(const Value& flat) {
  auto root = Value::dict();
  for (const auto& [key, tensor] : flat.pairs()) {
    const auto& name = key.as_string();
    const auto decoded = olmo::decode_key(name);
    if (decoded) {
      put(root, decoded->keys, value_of(tensor, decoded->pickled), name);
    } else {
      put(root, {key}, tensor, name);
    }
  }
  return root;
}

}  // namespace tessera::detail
