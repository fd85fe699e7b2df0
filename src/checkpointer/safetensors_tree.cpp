#include "checkpointer/safetensors_tree.h"

#include <torch/torch.h>

#include "format/olmo/keys.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

Value value_of(const Value& tensor, bool is_pickled) {
  if (!is_pickled) return tensor;
  const auto bytes = plain(tensor_of(tensor.as_tensor())).contiguous();
  return olmo::decode_value(
      {static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()});
}

}  // namespace

Value nested(const Value& flat) {
  auto root = Value::dict();
  for (const auto& [key, tensor] : flat.pairs()) {
    const auto& name = key.as_string();
    const auto decoded = olmo::decode_key(name);
    try {
      if (decoded) {
        olmo::put_at(root, decoded->keys, value_of(tensor, decoded->pickled));
      } else {
        olmo::put_at(root, {key}, tensor);
      }
    } catch (Error& error) {
      throw error.at_key(name);
    }
  }
  return root;
}

}  // namespace tessera::detail
