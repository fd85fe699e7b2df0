// The operators of a constructor inside deferred_init. The dispatcher hands each of them to
// `intercept` first, by the key that libtorch keeps for this purpose.
#include "tessera/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/process.h"
#include "fsdp/deferred/recording.h"
#include "tessera/error.h"
#include "torch/device.h"

namespace tessera {
namespace detail {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;
// torch::tensor fills what it has asked for through its address.
constexpr std::int64_t kSmallElements = 1 << 17;

// The recording of this thread's deferred_init; null outside.
thread_local std::shared_ptr<Recording> active;

// One operator inside deferred_init.
class Interception {
 public:
  Interception(Recording& recording, const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void run();

 private:
  [[nodiscard]] bool is_device_given() const { return device_ && !arguments_[*device_].isNone(); }
  [[nodiscard]] bool concerns_deferred(c10::Device device) const;
  void require_possible(c10::Device device) const;
  [[nodiscard]] bool is_ours() const;
  [[nodiscard]] bool is_small_on_cpu() const;
  [[nodiscard]] std::optional<at::Generator> generator() const;
  [[nodiscard]] bool returns_tensors() const;
  [[nodiscard]] at::Tensor without_data(const at::Tensor& tensor);
  [[nodiscard]] torch::jit::Stack meta_arguments();
  [[nodiscard]] std::optional<torch::jit::Stack> on_meta();
  [[nodiscard]] torch::jit::Stack written_arguments() const;
  [[nodiscard]] bool shows_given(const std::vector<at::Tensor>& results) const;
  void give_back(torch::jit::Stack results);
  void keep_arguments();
  void keep_dtype(const std::vector<at::Tensor>& results);
  void compute_with_data();
  void compute_for_nothing() const;
  void record(std::optional<at::Generator> before, const std::vector<at::Tensor>& results);

  Recording& recording_;
  const c10::OperatorHandle& op_;
  const std::vector<c10::Argument>& parameters_;  // of the operator's schema
  torch::jit::Stack& stack_;
  const torch::jit::Stack arguments_;
  torch::jit::Stack kept_;             // the arguments as a step keeps them
  std::optional<std::size_t> device_;  // which argument that is
  bool has_tensors_ = false;
  bool has_deferred_ = false;
  bool has_foreign_ = false;  // deferred elsewhere
  bool writes_deferred_ = false;
  bool writes_given_ = false;
  std::vector<c10::Storage> replaced_;  // what stood for arguments with data on the meta device
};

Interception::Interception(Recording& recording, const c10::OperatorHandle& op,
                           torch::jit::Stack& stack)
    : recording_(recording),
      op_(op),
      parameters_(op.schema().arguments()),
      stack_(stack),
      arguments_(stack.end() - static_cast<std::ptrdiff_t>(parameters_.size()), stack.end()) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].name() == "device") device_ = i;
    static_cast<void>(map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
      const auto owner = Recording::of(tensor);
      has_tensors_ = true;
      has_foreign_ |= owner && owner.get() != &recording_;
      has_deferred_ |= owner != nullptr;
      (owner ? writes_deferred_ : writes_given_) |= is_written(parameters_[i]);
      return tensor;
    }));
  }
}

// The meta device is asked for with the options of a tensor that has no data yet.
bool Interception::concerns_deferred(c10::Device device) const {
  return has_deferred_ || device.is_meta() || (!has_tensors_ && device_);
}

void Interception::require_possible(c10::Device device) const {
  if (has_foreign_) {
    throw Error(ErrorCode::unsupported,
                "inside deferred_init " + op_.schema().name() +
                    " is given a tensor of another deferred_init, which has no data yet");
  }
  if (is_accelerator(device)) {
    throw Error(ErrorCode::unsupported, "inside deferred_init " + op_.schema().name() +
                                            " is asked for device " + device.str() +
                                            ": build on the CPU, materialising chooses the device");
  }
}

bool Interception::is_ours() const {
  const bool is_given = is_device_given();
  const auto device = is_given ? arguments_[*device_].toDevice() : c10::Device(c10::kCPU);
  if (!concerns_deferred(device)) return false;
  require_possible(device);
  return has_deferred_ || !(is_given && is_small_on_cpu());
}

bool Interception::is_small_on_cpu() const {
  if (op_.schema().name() != "aten::empty" || !arguments_[0].isIntList()) return false;
  std::int64_t elements = 1;
  for (const auto size : arguments_[0].toIntVector()) elements *= size;
  return elements <= kSmallElements;
}

std::optional<at::Generator> Interception::generator() const {
  if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  auto generator = at::detail::getDefaultCPUGenerator();
  for (const auto& argument : arguments_) {
    if (argument.isGenerator()) generator = argument.toGenerator();
  }
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

bool Interception::returns_tensors() const {
  return std::ranges::any_of(op_.schema().returns(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

at::Tensor Interception::without_data(const at::Tensor& tensor) {
  // Those without dimensions go with any device, and may be numbers in disguise.
  if (tensor.is_meta() || tensor.dim() == 0) return tensor;
  auto like = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().device(c10::kMeta).requires_grad(false));
  replaced_.push_back(like.storage());
  return like;
}

torch::jit::Stack Interception::meta_arguments() {
  torch::jit::Stack arguments;
  for (const auto& argument : arguments_) {
    arguments.push_back(
        map_tensors(argument, [&](const at::Tensor& tensor) { return without_data(tensor); }));
  }
  if (device_ && (!has_tensors_ || !arguments[*device_].isNone()))
    arguments[*device_] = c10::Device(c10::kMeta);
  return arguments;
}

// Null: the meta device does not know the operator, or its results depend on values.
std::optional<torch::jit::Stack> Interception::on_meta() {
  auto stack = meta_arguments();
  try {
    op_.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  if (shows_given(flatten(stack))) return std::nullopt;
  return stack;
}

// The results of an operator that only writes.
torch::jit::Stack Interception::written_arguments() const {
  torch::jit::Stack written;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_written(parameters_[i])) written.push_back(arguments_[i]);
  }
  written.resize(op_.schema().returns().size());
  return written;
}

bool Interception::shows_given(const std::vector<at::Tensor>& results) const {
  return std::any_of(results.begin(), results.end(), [&](const at::Tensor& result) {
    return result.defined() && result.has_storage() &&
           std::any_of(replaced_.begin(), replaced_.end(), [&](const c10::Storage& storage) {
             return storage.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl();
           });
  });
}

void Interception::give_back(torch::jit::Stack results) {
  stack_.resize(stack_.size() - parameters_.size());
  for (auto& result : results) stack_.push_back(std::move(result));
}

void Interception::keep_arguments() {
  kept_ = recording_.keep(arguments_);
  if (device_ && !kept_[*device_].isNone()) kept_[*device_] = c10::Device(c10::kCPU);
}

// The default dtype may be another one when the step is played.
void Interception::keep_dtype(const std::vector<at::Tensor>& results) {
  if (has_tensors_ || results.empty()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].name() == "dtype" && kept_[i].isNone()) kept_[i] = results[0].scalar_type();
  }
}

void Interception::compute_with_data() {
  if (writes_deferred_) {
    throw Error(ErrorCode::unsupported, "inside deferred_init " + op_.schema().name() +
                                            " writes to tensors with and without data");
  }
  give_back(recording_.compute(op_, kept_));
}

void Interception::compute_for_nothing() const {
  std::uint64_t freed = 0;
  for (const auto& drawn : flatten(recording_.compute(op_, kept_))) freed += drawn.nbytes();
  note_freed(freed);
}

void Interception::record(std::optional<at::Generator> before,
                          const std::vector<at::Tensor>& results) {
  keep_dtype(results);
  // set_ gives a tensor another storage and writes to none.
  if (op_.schema().name() == "aten::set_") return;
  recording_.add({op_, std::move(kept_), {}, std::move(before), {}}, results);
}

void Interception::run() {
  if (!is_ours()) return op_.callBoxed(stack_);
  keep_arguments();
  if (writes_given_ || !(returns_tensors() || writes_deferred_)) return compute_with_data();
  auto before = generator();
  auto results = on_meta();
  const bool is_known = results.has_value();
  if (!is_known && !writes_deferred_) return compute_with_data();
  if (!is_known) results = written_arguments();
  // The generator has to go on as it would have, and what is only kept for later has to be
  // possible.
  if (before || !is_known) compute_for_nothing();
  record(std::move(before), flatten(*results));
  give_back(std::move(*results));
}

void intercept(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  if (active) {
    Interception(*active, op, *stack).run();
  } else {
    op.callBoxed(stack);
  }
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}

}  // namespace

DeferredScope::DeferredScope() : is_outermost_(active == nullptr) {
  if (!is_outermost_) return;
  active = std::make_shared<Recording>();
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

DeferredScope::~DeferredScope() {
  if (!is_outermost_) return;
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  active = nullptr;
}

void DeferredScope::seal(const torch::nn::Module& module) const {
  if (!is_outermost_) return;
  const auto seal_one = [](const at::Tensor& tensor) {
    if (const auto recording = Recording::of(tensor)) recording->seal(tensor);
  };
  for (const auto& parameter : module.parameters()) seal_one(parameter);
  for (const auto& buffer : module.buffers()) seal_one(buffer);
}

// Materialising ----------------------------------------------------------------
namespace {

struct Empty {
  std::string name;
  at::Tensor tensor;
};

// The module's own tensors on the meta device that `seen` does not have yet.
std::vector<Empty> empty_tensors(const NamedModule& named, std::unordered_set<const void*>& seen) {
  std::vector<Empty> found;
  const auto look_at = [&](const torch::OrderedDict<std::string, at::Tensor>& tensors) {
    for (const auto& entry : tensors) {
      const auto& tensor = entry.value();
      if (tensor.defined() && tensor.is_meta() && seen.insert(tensor.unsafeGetTensorImpl()).second)
        found.push_back({named.first + entry.key(), tensor});
    }
  };
  look_at(named.second->named_parameters(false));
  look_at(named.second->named_buffers(false));
  return found;
}

std::shared_ptr<Recording> require_recording(const Empty& empty, const torch::nn::Module& module) {
  if (auto recording = Recording::of(empty.tensor)) return recording;
  throw Error(ErrorCode::invalid_argument,
              "FSDP parameters should be materialized from meta device before training, but '" +
                  empty.name + "' of " + module.name() +
                  " is on meta device and has no record of how it was made. Unable to call "
                  "`reset_parameters()` for module on meta device: C++ cannot find it by its name. "
                  "Build the model inside tessera::deferred_init, or give a param_init_fn");
}

void give_memory(const at::Tensor& tensor, torch::Device device) {
  const auto memory = at::empty_strided(tensor.sizes(), tensor.strides(),
                                        at::TensorOptions(tensor.dtype()).device(device));
  tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
}

// Fills `empties` by the user's own function.
void init_module(const NamedModule& named, const std::vector<Empty>& empties,
                 const FillOptions& options) {
  for (const auto& empty : empties) give_memory(empty.tensor, options.device);
  if (!empties.empty()) options.param_init_fn(*named.second);
}

}  // namespace

std::vector<NamedModule> modules_below(
    torch::nn::Module& module, const std::function<bool(const torch::nn::Module&)>& enters) {
  std::vector<NamedModule> modules{{"", &module}};
  std::unordered_set<const torch::nn::Module*> seen{&module};
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto [prefix, parent] = modules[i];
    for (const auto& child : parent->named_children()) {
      if (enters(*child.value()) && seen.insert(child.value().get()).second)
        modules.emplace_back(prefix + child.key() + ".", child.value().get());
    }
  }
  return modules;
}

void fill(const std::vector<NamedModule>& modules, const FillOptions& options) {
  const torch::NoGradGuard no_grad;
  auto seen = options.ignored;
  std::map<std::shared_ptr<Recording>, std::vector<at::Tensor>> recorded;
  for (const auto& named : modules) {
    const auto empties = empty_tensors(named, seen);
    if (options.param_init_fn) {
      init_module(named, empties, options);
      continue;
    }
    for (const auto& empty : empties)
      recorded[require_recording(empty, *named.second)].push_back(empty.tensor);
  }
  for (const auto& [recording, tensors] : recorded) recording->fill(tensors, options.device);
}

}  // namespace detail

bool is_deferred(const torch::Tensor& tensor) {
  return detail::Recording::of(tensor) != nullptr;
}

void materialize(torch::nn::Module& module, torch::Device device,
                 const std::function<void(torch::nn::Module&)>& param_init_fn) {
  detail::fill(detail::modules_below(module, [](const torch::nn::Module&) { return true; }),
               {.device = device, .param_init_fn = param_init_fn});
}

}  // namespace tessera
