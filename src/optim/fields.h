// The visitors of StateFields: fields to a dict, a dict to fields, and their names.
#pragma once

#include <torch/types.h>

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tessera/optimizer_ref.h"

namespace tessera::detail {

// Saves.
class FieldsToDict final : public StateFields {
 public:
  void count(const char* name, std::int64_t& field) override;
  void tensor(const char* name, at::Tensor& field) override;
  void number(const char* name, double& field) override;
  void integer(const char* name, std::int64_t& field) override;
  void flag(const char* name, bool& field) override;
  void value(const char* name, const std::function<Value()>& get,
             const std::function<void(const Value&)>& set) override;
  void fixed(const char* name, const Value& value, bool must_match) override;

  [[nodiscard]] Value take() { return Value::dict(std::move(pairs_)); }

 private:
  std::vector<Value::Pair> pairs_;
};

// Loads. What `given` lacks stays as it is.
class DictToFields final : public StateFields {
 public:
  // `parameter`: whose state it is; undefined for options. `keep`: see OptimizerAccess.
  DictToFields(const Value& given, at::Tensor parameter, bool keep);
  void count(const char* name, std::int64_t& field) override;
  void tensor(const char* name, at::Tensor& field) override;
  void number(const char* name, double& field) override;
  void integer(const char* name, std::int64_t& field) override;
  void flag(const char* name, bool& field) override;
  void value(const char* name, const std::function<Value()>& get,
             const std::function<void(const Value&)>& set) override;
  void fixed(const char* name, const Value& value, bool must_match) override;

  // Keys that no field has asked for, less "params".
  [[nodiscard]] std::vector<std::string> left_over() const;

 private:
  const Value* find(const char* name);
  Value given_;
  at::Tensor parameter_;
  bool keep_;
  std::unordered_set<std::string> seen_;
};

// Names alone.
class FieldNames final : public StateFields {
 public:
  void count(const char* name, std::int64_t&) override { names_.insert(name); }
  void tensor(const char* name, at::Tensor&) override { names_.insert(name); }
  void number(const char* name, double&) override { names_.insert(name); }
  void integer(const char* name, std::int64_t&) override { names_.insert(name); }
  void flag(const char* name, bool&) override { names_.insert(name); }
  void value(const char* name, const std::function<Value()>&,
             const std::function<void(const Value&)>&) override {
    names_.insert(name);
  }
  void fixed(const char* name, const Value&, bool) override { names_.insert(name); }

  [[nodiscard]] bool has(const std::string& name) const { return names_.contains(name); }

 private:
  std::unordered_set<std::string> names_;
};

// Numbers come back as what was saved; PyTorch has some of them as scalar tensors.
[[nodiscard]] double number_of(const Value& value);
// A tensor for `parameter`'s state: on its device, in its dtype where both are floating.
[[nodiscard]] at::Tensor state_tensor(const Value& value, const at::Tensor& parameter, bool keep);

}  // namespace tessera::detail
