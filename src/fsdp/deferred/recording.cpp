#include "fsdp/deferred/recording.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "tessera/error.h"

namespace tessera::detail {
namespace {

// Arguments with data of this size are copied, larger ones must not change.
constexpr std::size_t kSmallBytes = 1 << 20;

// The mark that a storage without memory carries in place of an address.
struct Mark {
  std::shared_ptr<Recording> recording;  // null in stand-ins, which a recording holds
  std::size_t id = 0;
};

void delete_mark(void* mark) {
  delete static_cast<Mark*>(mark);
}

const Mark* mark_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().cast_context<Mark>(
      &delete_mark);
}

void put_mark(const c10::Storage& storage, Mark mark) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nullptr, new Mark(std::move(mark)), &delete_mark, c10::kMeta));
}

std::optional<std::size_t> storage_id_of(const at::Tensor& tensor) {
  const auto* mark = mark_of(tensor);
  return mark ? std::optional(mark->id) : std::nullopt;
}

// Calls `visit` with the ids of the storages that `values` stand for.
template <typename Visit>
void visit_storages(const torch::jit::Stack& values, const Visit& visit) {
  for (const auto& value : values) {
    static_cast<void>(map_tensors(value, [&](const at::Tensor& tensor) {
      if (const auto id = storage_id_of(tensor)) visit(*id);
      return tensor;
    }));
  }
}

// Within its life the default generator is in the state of `state`.
class Rewound {
 public:
  explicit Rewound(const at::Generator& state) : lock_(mutex()), before_(swap(state)) {}
  ~Rewound() { swap(before_); }
  Rewound(const Rewound&) = delete;
  Rewound& operator=(const Rewound&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static at::Generator swap(const at::Generator& state) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    auto before = generator.clone();
    generator.set_state(state.get_state());
    return before;
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator before_;
};

// The operator with the random numbers that it had: from a generator of its own where it takes one,
// as other threads may use the default one at the same time.
void call_rewound(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                  const at::Generator& generator) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") continue;
    stack[i] = generator.clone();
    return op.callBoxed(stack);
  }
  const Rewound rewound(generator);
  op.callBoxed(stack);
}

using Replacement = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor replaced(const at::Tensor& tensor, const Replacement& replacement) {
  return tensor.defined() ? replacement(tensor) : tensor;
}

// Calls `visit` with the ids of the storages that a step uses and makes.
template <typename Visit>
void visit_storages_of(const Step& step, const Visit& visit) {
  visit_storages(step.arguments, visit);
  for (const auto& [index, result] : step.made) visit(*storage_id_of(result));
}

// The value to play with for an argument with data: a copy if it is small; a large one must not
// change.
at::Tensor kept_value(Step& step, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  if (tensor.nbytes() <= kSmallBytes) return tensor.detach().clone();
  step.given.emplace_back(tensor, tensor._version());
  return tensor;
}

c10::Storage copied_to(c10::Device device, const c10::Storage& storage) {
  const auto bytes =
      at::empty({0}, at::kByte).set_(storage, 0, static_cast<std::int64_t>(storage.nbytes()), 1);
  return bytes.to(device).storage();
}

void require_like(const at::Tensor& result, const at::Tensor& expected, const Step& step) {
  if (result.sizes() == expected.sizes() && result.scalar_type() == expected.scalar_type() &&
      result.storage_offset() == expected.storage_offset())
    return;
  throw Error(ErrorCode::unsupported,
              step.op.schema().name() + " has another result with data than without");
}

}  // namespace

// Within its life the storages wanted; all others that steps need are freed after their last one.
// Steps run on the CPU, in the order in which they were recorded, without autograd.
class Replay {
 public:
  explicit Replay(const Recording& recording) : recording_(recording) {}

  void want(std::size_t id);
  void want_all(const torch::jit::Stack& arguments);
  void run();
  [[nodiscard]] const c10::Storage& storage(std::size_t id) const { return real_.at(id); }
  // The arguments with stand-ins replaced by what they stand for.
  [[nodiscard]] torch::jit::Stack real(const torch::jit::Stack& arguments) const;

 private:
  void need(std::size_t id, std::size_t end);
  void play(const Step& step);
  void bind(const Step& step, const torch::jit::Stack& results);

  const Recording& recording_;
  std::set<std::size_t> wanted_;
  std::set<std::size_t> steps_;                           // to play
  std::unordered_map<std::size_t, std::size_t> visited_;  // id: its steps before this are needed
  std::unordered_map<std::size_t, c10::Storage> real_;
};

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

c10::IValue map_tensors(const c10::IValue& value, const Replacement& replacement) {
  if (value.isTensor()) return replaced(value.toTensor(), replacement);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(replaced(tensor, replacement));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(replaced(*tensor, replacement)) : std::nullopt);
    return list;
  }
  return value;
}

std::vector<at::Tensor> flatten(const torch::jit::Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const auto& result : results) {
    if (result.isTensor()) tensors.push_back(result.toTensor());
    if (!result.isTensorList()) continue;
    const auto listed = result.toTensorVector();
    tensors.insert(tensors.end(), listed.begin(), listed.end());
  }
  return tensors;
}

at::Tensor view_on(const c10::Storage& storage, const at::Tensor& like) {
  auto view = at::empty({0}, at::TensorOptions(like.dtype()).device(storage.device()));
  view.set_(storage, like.storage_offset(), like.sizes(), like.strides());
  view._set_conj(like.is_conj());
  view._set_neg(like.is_neg());
  return view;
}

void Replay::need(std::size_t id, std::size_t end) {
  std::vector<std::pair<std::size_t, std::size_t>> open{{id, end}};
  while (!open.empty()) {
    const auto [at, limit] = open.back();
    open.pop_back();
    auto& visited = visited_[at];
    if (limit <= visited) continue;
    for (const auto step : recording_.storages_[at].steps) {
      if (step < visited || step >= limit || !steps_.insert(step).second) continue;
      visit_storages(recording_.steps_[step].arguments,
                     [&, step = step](std::size_t used) { open.emplace_back(used, step); });
    }
    visited = limit;
  }
}

void Replay::want(std::size_t id) {
  wanted_.insert(id);
  need(id, recording_.steps_.size());
}

void Replay::want_all(const torch::jit::Stack& arguments) {
  visit_storages(arguments, [&](std::size_t id) { want(id); });
}

void Replay::run() {
  std::unordered_map<std::size_t, std::size_t> last;  // step that uses a storage
  for (const auto step : steps_) {
    visit_storages_of(recording_.steps_[step],
                      [&, step = step](std::size_t id) { last[id] = step; });
  }
  for (const auto step : steps_) {
    play(recording_.steps_[step]);
    visit_storages_of(recording_.steps_[step], [&, step = step](std::size_t id) {
      if (last[id] == step && !wanted_.contains(id)) real_.erase(id);
    });
  }
}

torch::jit::Stack Replay::real(const torch::jit::Stack& arguments) const {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      const auto id = storage_id_of(tensor);
      return id ? view_on(real_.at(*id), tensor) : tensor;
    }));
  }
  return stack;
}

void Replay::play(const Step& step) {
  for (const auto& [tensor, version] : step.given) {
    if (tensor._version() == version) continue;
    throw Error(ErrorCode::invalid_argument,
                "a tensor with data that " + step.op.schema().name() +
                    " used inside deferred_init was changed before the result was materialised");
  }
  auto stack = real(step.arguments);
  if (step.generator) {
    call_rewound(step.op, stack, *step.generator);
  } else {
    step.op.callBoxed(stack);
  }
  bind(step, stack);
}

// The meta device's strides are the ones that later steps and the tensors themselves go by.
void Replay::bind(const Step& step, const torch::jit::Stack& results) {
  const auto tensors = flatten(results);
  for (const auto& [index, expected] : step.made) {
    auto result = tensors.at(index);
    require_like(result, expected, step);
    if (result.strides() != expected.strides())
      result =
          at::empty_strided(expected.sizes(), expected.strides(), result.options()).copy_(result);
    real_.insert_or_assign(*storage_id_of(expected), result.storage());
  }
}

std::shared_ptr<Recording> Recording::of(const at::Tensor& tensor) {
  const auto* mark = mark_of(tensor);
  return mark ? mark->recording : nullptr;
}

at::Tensor Recording::stand_in(const at::Tensor& tensor) const {
  return view_on(storages_[*storage_id_of(tensor)].stand_in, tensor);
}

torch::jit::Stack Recording::keep(c10::ArrayRef<c10::IValue> arguments) const {
  torch::jit::Stack kept;
  for (const auto& argument : arguments) {
    kept.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      return holds(tensor) ? stand_in(tensor) : tensor;
    }));
  }
  return kept;
}

void Recording::adopt(const at::Tensor& tensor) {
  const auto stand_in = at::empty({0}, tensor.options().requires_grad(false)).storage();
  put_mark(stand_in, {nullptr, storages_.size()});
  put_mark(tensor.storage(), {shared_from_this(), storages_.size()});
  storages_.push_back({stand_in});
}

void Recording::add(Step step, const std::vector<at::Tensor>& results) {
  auto changed = adopt_results(step, results);
  const auto& arguments = step.op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    step.arguments[i] = map_tensors(step.arguments[i], [&](const at::Tensor& tensor) {
      const auto id = storage_id_of(tensor);
      if (id && is_written(arguments[i])) changed.insert(*id);
      return id ? tensor : kept_value(step, tensor);
    });
  }
  if (changed.empty()) return;
  for (const auto id : changed) storages_[id].steps.push_back(steps_.size());
  steps_.push_back(std::move(step));
}

// The ids of their storages.
std::set<std::size_t> Recording::adopt_results(Step& step, const std::vector<at::Tensor>& results) {
  std::set<std::size_t> ids;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& result = results[i];
    if (!result.defined() || !result.is_meta() || mark_of(result)) continue;
    adopt(result);
    ids.insert(*storage_id_of(result));
    step.made.emplace_back(i, stand_in(result));
  }
  return ids;
}

torch::jit::Stack Recording::compute(const c10::OperatorHandle& op,
                                     const torch::jit::Stack& arguments) const {
  const torch::NoGradGuard no_grad;
  Replay replay(*this);
  replay.want_all(arguments);
  replay.run();
  auto stack = replay.real(arguments);
  op.callBoxed(stack);
  return stack;
}

void Recording::seal(const at::Tensor& tensor) {
  const auto version = tensor.unsafeGetTensorImpl()->version_counter();
  if (version.enabled())
    storages_[*storage_id_of(tensor)].sealed.emplace(version, version.current_version());
}

void Recording::require_unchanged(const RecordedStorage& storage) {
  if (!storage.sealed || storage.sealed->first.current_version() == storage.sealed->second) return;
  throw Error(ErrorCode::invalid_argument,
              "a tensor was changed after deferred_init had returned, while it had no data: "
              "change it inside, or after it was materialised");
}

void Recording::fill(const std::vector<at::Tensor>& tensors, c10::Device device) {
  const torch::NoGradGuard no_grad;
  const auto self = shared_from_this();  // the last of `tensors` may be all that holds it
  std::unordered_map<std::size_t, c10::Storage> storages;
  Replay replay(*this);
  for (const auto& tensor : tensors) {
    const auto id = *storage_id_of(tensor);
    auto& recorded = storages_[id];
    require_unchanged(recorded);
    if (auto filled = recorded.filled.lock()) {
      storages.emplace(id, c10::Storage(std::move(filled)));
    } else {
      replay.want(id);
    }
  }
  replay.run();
  std::vector<at::Tensor> values;
  for (const auto& tensor : tensors) {
    const auto id = *storage_id_of(tensor);
    if (!storages.contains(id)) storages.emplace(id, copied_to(device, replay.storage(id)));
    values.push_back(view_on(storages.at(id), tensor));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto id = *storage_id_of(tensors[i]);
    storages_[id].filled =
        c10::weak_intrusive_ptr<c10::StorageImpl>(storages.at(id).getWeakStorageImpl());
    // What TensorBase::set_data refuses between devices; version and requires_grad stay.
    tensors[i].unsafeGetTensorImpl()->shallow_copy_from(values[i].getIntrusivePtr());
  }
}

}  // namespace tessera::detail
