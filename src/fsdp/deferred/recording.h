// Recording: how tensors without data are made, and making them.
//
// It keeps for every storage that was made without memory the steps, operators with their
// arguments, that created it and wrote to it. All else that a tensor is, its shape, strides, offset
// and dtype, the tensor itself knows: views need no steps, and neither does it matter which tensor
// objects show a storage. Playing the steps again fills storages; a tensor is a geometry on one.
//
// A storage without memory holds its recording alive; a recording refers to storages by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>
#include <torch/types.h>

namespace tessera::detail {

[[nodiscard]] bool is_written(const c10::Argument& argument);
// `value` with every defined tensor in it replaced.
[[nodiscard]] c10::IValue map_tensors(
    const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replacement);
// The tensors of an operator's results, one after the other.
[[nodiscard]] std::vector<at::Tensor> flatten(const torch::jit::Stack& results);
// `like`'s geometry on `storage`.
[[nodiscard]] at::Tensor view_on(const c10::Storage& storage, const at::Tensor& like);

// One operator. Tensors without data stand among the arguments as stand-ins: tensors that a
// recording made for it with the geometry of that moment.
struct Step {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
  // Results on storages that the operator created: their place among its results, a stand-in.
  std::vector<std::pair<std::size_t, at::Tensor>> made = {};
  // The generator as it was before an operator that draws random numbers.
  std::optional<at::Generator> generator = {};
  // Large arguments with data, with the versions that they must still have when it is played.
  std::vector<std::pair<at::Tensor, std::uint32_t>> given = {};
};

class Recording : public std::enable_shared_from_this<Recording> {
 public:
  // The recording of the tensor's storage; null for a tensor with data or of another origin.
  [[nodiscard]] static std::shared_ptr<Recording> of(const at::Tensor& tensor);
  [[nodiscard]] bool holds(const at::Tensor& tensor) const { return of(tensor).get() == this; }

  // The arguments with stand-ins for tensors without data.
  [[nodiscard]] torch::jit::Stack keep(c10::ArrayRef<c10::IValue> arguments) const;
  // Enters `step`, whose results, flattened, are `results`. Those on storages that are new become
  // ours. A step that neither made nor wrote anything is forgotten.
  void add(Step step, const std::vector<at::Tensor>& results);
  // Results of the operator on the values that its arguments, as `keep` gives them, have now.
  [[nodiscard]] torch::jit::Stack compute(const c10::OperatorHandle& op,
                                          const torch::jit::Stack& arguments) const;

  // Changes to `tensor` from here on are noticed, and refused by `fill`.
  void seal(const at::Tensor& tensor);
  // Gives `tensors`, all ours, the values that they had when they were sealed, on `device`. Those
  // that showed one storage do so again, also over several calls. On an exception none has changed.
  void fill(const std::vector<at::Tensor>& tensors, c10::Device device);

 private:
  friend class Replay;
  struct RecordedStorage {
    c10::Storage stand_in;
    std::vector<std::size_t> steps = {};  // that made it and wrote to it, ascending
    std::optional<std::pair<c10::VariableVersion, std::uint32_t>> sealed = {};
    c10::weak_intrusive_ptr<c10::StorageImpl> filled{
        c10::intrusive_ptr<c10::StorageImpl>()};  // while a tensor shows what `fill` made
  };

  [[nodiscard]] at::Tensor stand_in(const at::Tensor& tensor) const;
  void adopt(const at::Tensor& tensor);
  [[nodiscard]] std::set<std::size_t> adopt_results(Step& step,
                                                    const std::vector<at::Tensor>& results);
  static void require_unchanged(const RecordedStorage& storage);

  std::vector<Step> steps_;
  std::vector<RecordedStorage> storages_;
};

// The values of a unit's tensors before they are cut: data where they have none.

using NamedModule = std::pair<std::string, torch::nn::Module*>;  // with a dot behind the name

// `module`, named "", and what is below it, each once, breadth first; children for which `enters`
// is false are left out with all that only they reach.
[[nodiscard]] std::vector<NamedModule> modules_below(
    torch::nn::Module& module, const std::function<bool(const torch::nn::Module&)>& enters);

struct FillOptions {
  torch::Device device = torch::kCPU;
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  std::unordered_set<const void*> ignored = {};  // TensorImpls that stay as they are
};
// `materialize` of tessera/deferred_init.h for the own tensors of these modules.
void fill(const std::vector<NamedModule>& modules, const FillOptions& options);

}  // namespace tessera::detail
