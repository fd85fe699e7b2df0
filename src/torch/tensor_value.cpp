#include "tessera/tensor_value.h"

#include "torch/defined.h"
#include "torch/tensor.h"

namespace tessera {

Value to_value(const torch::Tensor& tensor) {
  require_defined("to_value", tensor);
  return leaf_of(tensor);
}

torch::Tensor to_tensor(const Value& value) {
  return tensor_of(value.as_tensor());
}

torch::Tensor to_tensor(const Tensor& tensor) {
  return tensor_of(tensor);
}

}  // namespace tessera
