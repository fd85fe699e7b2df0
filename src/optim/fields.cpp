#include "optim/fields.h"

#include <torch/torch.h>

#include <cmath>
#include <utility>

#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::detail {

double number_of(const Value& value) {
  if (!value.is(Value::Kind::tensor)) return value.as_real();
  const auto tensor = tensor_of(value.as_tensor());
  if (tensor.numel() != 1)
    throw Error(ErrorCode::mismatch, "a tensor of " + std::to_string(tensor.numel()) +
                                         " elements where one number is expected");
  return tensor.item<double>();
}

at::Tensor state_tensor(const Value& value, const at::Tensor& parameter, bool keep) {
  auto tensor = tensor_of(value.as_tensor());
  const bool casts = parameter.is_floating_point() && tensor.is_floating_point();
  const auto target = tensor.options()
                          .device(parameter.device())
                          .dtype(casts ? parameter.scalar_type() : tensor.scalar_type());
  return tensor.to(target, /*non_blocking=*/false, /*copy=*/!keep);
}

void FieldsToDict::count(const char* name, std::int64_t& field) {
  pairs_.emplace_back(name, leaf_of(torch::tensor(static_cast<float>(field), torch::kFloat32)));
}
void FieldsToDict::tensor(const char* name, at::Tensor& field) {
  if (!field.defined()) return;
  pairs_.emplace_back(name, leaf_of(field.is_cpu() ? field : field.cpu()));
}
void FieldsToDict::number(const char* name, double& field) {
  pairs_.emplace_back(name, field);
}
void FieldsToDict::integer(const char* name, std::int64_t& field) {
  pairs_.emplace_back(name, field);
}
void FieldsToDict::flag(const char* name, bool& field) {
  pairs_.emplace_back(name, field);
}
void FieldsToDict::value(const char* name, const std::function<Value()>& get,
                         const std::function<void(const Value&)>& /*set*/) {
  pairs_.emplace_back(name, get());
}
void FieldsToDict::fixed(const char* name, const Value& value, bool /*must_match*/) {
  pairs_.emplace_back(name, value);
}

DictToFields::DictToFields(const Value& given, at::Tensor parameter, bool keep)
    : given_(given), parameter_(std::move(parameter)), keep_(keep) {}

const Value* DictToFields::find(const char* name) {
  seen_.insert(name);
  return given_.find(name);
}

void DictToFields::count(const char* name, std::int64_t& field) {
  if (const auto* value = find(name)) field = std::llround(number_of(*value));
}

void DictToFields::tensor(const char* name, at::Tensor& field) {
  const auto* value = find(name);
  if (value == nullptr || value->is(Value::Kind::none)) return;
  const auto& shape = value->as_tensor().shape;
  if (parameter_.sizes() != at::IntArrayRef(shape)) {
    throw Error(ErrorCode::mismatch, "the state has shape " + to_string(shape) +
                                         ", the optimizer's parameter " +
                                         to_string(parameter_.sizes().vec()))
        .at_key(name);
  }
  field = state_tensor(*value, parameter_, keep_);
}

void DictToFields::number(const char* name, double& field) {
  if (const auto* value = find(name)) field = number_of(*value);
}
void DictToFields::integer(const char* name, std::int64_t& field) {
  if (const auto* value = find(name)) field = value->as_int();
}
void DictToFields::flag(const char* name, bool& field) {
  if (const auto* value = find(name)) field = value->as_bool();
}
void DictToFields::value(const char* name, const std::function<Value()>& /*get*/,
                         const std::function<void(const Value&)>& set) {
  if (const auto* value = find(name)) set(*value);
}

void DictToFields::fixed(const char* name, const Value& value, bool must_match) {
  const auto* given = find(name);
  if (given == nullptr || !must_match || *given == value) return;
  throw Error(ErrorCode::unsupported, "the state's optimizer uses an option that this one lacks")
      .at_key(name);
}

std::vector<std::string> DictToFields::left_over() const {
  std::vector<std::string> names;
  for (const auto& [key, value] : given_.pairs()) {
    if (!key.is(Value::Kind::string)) continue;
    const auto& name = key.as_string();
    if (name != "params" && !seen_.contains(name)) names.push_back(name);
  }
  return names;
}

}  // namespace tessera::detail
