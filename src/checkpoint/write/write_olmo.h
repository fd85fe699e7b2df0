// What the writers of the OLMo kinds share.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/write/targets.h"
#include "checkpoint/write/write_archive.h"

namespace tessera {

// The tensors of a training state, with the names that errors give them.
class SourceTensors {
 public:
  explicit SourceTensors(const OlmoState& state);
  // `tensor` must be a leaf of the state's model or optimizer.
  [[nodiscard]] const Leaf& of(const Tensor& tensor) const { return *by_tensor_.at(&tensor); }

 private:
  void add(const std::string& name, const Value& value);

  std::deque<Leaf> leaves_;
  std::unordered_map<const Tensor*, const Leaf*> by_tensor_;
};

// A copy of `tree` in which dicts and lists are new and every tensor leaf is what `replace` says.
[[nodiscard]] Value with_tensors(const Value& tree,
                                 const std::function<Value(const Tensor&)>& replace);
// A leaf of `archive` that holds all of `tensor`.
[[nodiscard]] Value whole_tensor(const SourceTensors& sources, const Tensor& tensor,
                                 Archive& archive);

void write_olmo_full(ConvertJob& job, const OlmoState& state);
void write_olmo_torch_new(ConvertJob& job, const OlmoState& state);
void write_olmo_legacy(ConvertJob& job, const OlmoState& state);
void write_olmo_local(ConvertJob& job, const OlmoState& state);
// The trainer's state as `name`, when there is one.
void write_train(const ConvertJob& job, const OlmoState& state, const std::string& name);

}  // namespace tessera
