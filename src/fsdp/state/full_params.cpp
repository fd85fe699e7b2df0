#include "tessera/pytorch/state_dict.h"

#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/copies.h"
#include "base/log.h"
#include "fsdp/state/state_dict.h"
#include "fsdp/step/root.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::entry_of;
using detail::state_entries;
using detail::StateEntry;
using detail::Unit;

void require_quiet(const Unit& unit) {
  if (unit.schedule().is_quiet()) return;
  throw Error(ErrorCode::invalid_argument,
              "whole parameters were asked for in a forward or backward")
      .at_key(unit.name());
}

at::Tensor copied(const at::Tensor& tensor, bool to_cpu) {
  const auto whole = tensor.detach();
  return to_cpu && !whole.is_cpu() ? whole.to(at::kCPU) : whole.clone();
}

at::Tensor own_copy(const at::Tensor& tensor, const detail::TypesOfBuffers& types, bool to_cpu) {
  auto own = copied(tensor, to_cpu);
  const auto type = types.find(tensor.unsafeGetTensorImpl());
  return type == types.end() ? own : own.to(type->second);
}

// Copies of sharded parameters that their units gave, by the module's tensor.
using Copies = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

// Memory for the parameters that this rank is to have.
Copies room_for_copies(const std::vector<Unit*>& units, const FullStateOptions& options) {
  Copies room;
  for (const auto* unit : units) {
    if (options.rank0_only && unit->mesh().rank() != 0) continue;
    auto like = unit->shard().options().requires_grad(false);
    if (options.offload_to_cpu) like = like.device(at::kCPU);
    for (const auto& param : unit->params())
      room.emplace(param.full.unsafeGetTensorImpl(), at::empty(param.full.sizes(), like));
  }
  return room;
}

// An array that takes the largest of those that are like the first.
at::Tensor memory_for_each(const std::vector<Unit*>& units) {
  std::int64_t largest = 0;
  for (const auto* unit : units) largest = std::max(largest, unit->layout().gathered_elements);
  return units.empty() ? at::Tensor() : at::empty({largest}, units.front()->shard().options());
}

// All memory is there before a unit is gathered, and units are gathered into one array: copies
// among arrays that come and go would leave holes, which malloc keeps.
Copies gathered_copies(const torch::nn::Module& module, const FullStateOptions& options) {
  std::vector<Unit*> units;
  for (const auto& [name, unit] : detail::units_below(module)) {
    require_quiet(*unit);
    if (unit->has_shards()) units.push_back(unit.get());
  }
  for (auto* unit : units) unit->adopt_replaced();
  auto copies = room_for_copies(units, options);
  const auto memory = memory_for_each(units);
  for (auto* unit : units) {
    const auto whole = unit->whole().gather(memory);
    for (std::size_t i = 0; i < unit->params().size(); ++i) {
      const auto copy = copies.find(unit->params()[i].full.unsafeGetTensorImpl());
      if (copy != copies.end()) copy->second.copy_(unit->whole().view(whole, i));
    }
  }
  return copies;
}

Error differs_in_shape(const std::string& name, const Shape& given, const Shape& shape) {
  return Error(ErrorCode::mismatch,
               "the state has shape " + to_string(given) + ", the module " + to_string(shape))
      .at_key(name);
}

void require_entry(const StateEntry& entry, const FullState& state) {
  const auto& [name, tensor] = entry;
  const auto* given = state.find(name);
  if (given == nullptr) throw Error(ErrorCode::mismatch, "the state lacks this name").at_key(name);
  if (given->sizes() != tensor.sizes())
    throw differs_in_shape(name, given->sizes().vec(), tensor.sizes().vec());
}

// All of them, before anything is changed.
void require_same(const std::vector<StateEntry>& entries, const FullState& state) {
  std::unordered_set<std::string> known;
  for (const auto& entry : entries) {
    known.insert(entry.name);
    require_entry(entry, state);
  }
  for (const auto& entry : state) {
    if (!known.contains(entry.key()))
      throw Error(ErrorCode::mismatch, "the module lacks this name").at_key(entry.key());
  }
}

void require_possible(const FullParamsOptions& options) {
  if (options.writeback && options.rank0_only) {
    throw Error(ErrorCode::invalid_argument,
                "writeback=True and rank0_only=True is not supported, as model parameter shards "
                "will be different across ranks");
  }
  if (options.with_grads && options.offload_to_cpu)
    throw Error(ErrorCode::unsupported, "with_grads=True and offload_to_cpu=True");
}

void warn_of_copies(const FullParamsOptions& options) {
  if (!options.offload_to_cpu || options.rank0_only) return;
  log_of_all(
      LogLevel::warning,
      "offload_to_cpu=True and rank0_only=False copies all parameters to the CPU once for every "
      "rank of a host; rank0_only=True copies them once");
}

}  // namespace

// One unit whose parameters are shown whole.
class FullParams::Shown {
 public:
  Shown(std::shared_ptr<Unit> unit, const FullParamsOptions& options)
      : unit_(std::move(unit)), options_(options) {
    const torch::NoGradGuard no_grad;
    unit_->look_at_reductions(detail::GradReducer::Look::all);
    unit_->adopt_replaced();
    auto whole = unit_->whole().gather();
    if (options_.with_grads) {
      unit_->require_kept_untouched();
      gather_gradients();
    }
    const bool wanted = is_wanted();
    if (wanted && options_.offload_to_cpu) whole = whole.to(at::kCPU);
    entry_of(*unit_).pinned = false;
    unit_->show(wanted ? whole : at::Tensor(), options_.writeback);
    if (wanted && gradients_.defined()) show_gradients();
  }

  ~Shown() {
    const torch::NoGradGuard no_grad;
    keep_changes();
    if (gradients_.defined()) hide_gradients();
    unit_->hide();
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

 private:
  // What a destructor cannot throw is said.
  void keep_changes() {
    if (!options_.writeback) return;
    try {
      unit_->keep_shown();
    } catch (const Error& error) {
      log(LogLevel::warning, std::string("changes of whole parameters are lost: ") + error.what());
    }
    if (gradients_.defined()) write_back_gradients();
  }

  [[nodiscard]] bool is_wanted() const { return !options_.rank0_only || unit_->mesh().rank() == 0; }

  void show_gradients() {
    for (std::size_t i = 0; i < unit_->params().size(); ++i) {
      if (has_gradient_[i])
        unit_->params()[i].full.mutable_grad() = unit_->whole().view(gradients_, i);
    }
  }

  void hide_gradients() {
    for (auto& param : unit_->params()) param.full.mutable_grad() = at::Tensor();
    unit_->show_gradients();
  }

  void gather_gradients() {
    unit_->hide_gradients();
    auto mine = at::zeros_like(unit_->shard());
    const auto count = static_cast<std::int64_t>(unit_->params().size());
    auto flags = at::zeros({count}, mine.options().dtype(at::kFloat));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& local = unit_->params()[i].local;
      if (!local.grad().defined()) continue;
      flags[i] = 1;
      mine.narrow(0, local.storage_offset(), local.numel()).copy_(local.grad().view({-1}));
    }
    flags = unit_->whole().sum(flags);
    has_gradient_.resize(count);
    for (std::int64_t i = 0; i < count; ++i) has_gradient_[i] = flags[i].item<float>() > 0;
    gradients_ = unit_->whole().gather_of(mine);
  }

  void write_back_gradients() {
    auto mine = at::zeros_like(unit_->shard());
    unit_->whole().keep_own(gradients_, mine);
    for (auto& param : unit_->params()) {
      const auto& local = param.local;
      if (!local.grad().defined()) continue;
      local.mutable_grad().copy_(
          mine.narrow(0, local.storage_offset(), local.numel()).view(local.sizes()));
    }
  }

  std::shared_ptr<Unit> unit_;
  FullParamsOptions options_;
  at::Tensor gradients_;
  std::vector<bool> has_gradient_;
};

FullParams::FullParams(ModuleRef module, const FullParamsOptions& options) {
  require_possible(options);
  warn_of_copies(options);
  for (const auto& [name, unit] : detail::units_below(module.get())) {
    if (!options.recurse && !name.empty()) continue;
    require_quiet(*unit);
    if (unit->has_shards()) shown_.push_back(std::make_unique<Shown>(unit, options));
  }
}

FullParams::~FullParams() = default;

FullState full_state_dict(ModuleRef module, const FullStateOptions& options) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, unit] : detail::units_below(module.get()))
    unit->look_at_reductions(detail::GradReducer::Look::all);
  auto copies = gathered_copies(module.get(), options);
  const auto own_types = detail::types_of_buffers(module.get());
  FullState state;
  bool is_dropped = false;
  for (const auto& [name, tensor] : state_entries(module.get())) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    auto copy = copies.find(impl);
    // A sharded parameter without a copy: another rank has it.
    if (copy == copies.end() && detail::find_owner(tensor).is_sharded()) {
      is_dropped = true;
      continue;
    }
    if (copy == copies.end())
      copy = copies.emplace(impl, own_copy(tensor, own_types, options.offload_to_cpu)).first;
    state.insert(name, copy->second);
  }
  return is_dropped ? FullState() : state;
}

void load_full_state_dict(ModuleRef module, const FullState& state) {
  const auto entries = state_entries(module.get());
  require_same(entries, state);
  detail::refresh_units(module.get());
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : entries) detail::require_quiet(tensor);
  for (const auto& [name, tensor] : entries) detail::set_entry(tensor, state[name]);
}

void detail::require_shape(const std::string& name, const Shape& shape, const Value& given) {
  if (!given.is(Value::Kind::tensor))
    throw Error(ErrorCode::mismatch, "the state has no tensor here").at_key(name);
  if (given.as_tensor().shape != shape)
    throw differs_in_shape(name, given.as_tensor().shape, shape);
}

void detail::require_quiet(const at::Tensor& tensor) {
  const auto owner = find_owner(tensor);
  if (owner.is_sharded()) tessera::require_quiet(*owner.unit);
}

void detail::set_entry(const at::Tensor& tensor, const at::Tensor& given) {
  const torch::NoGradGuard no_grad;
  const auto owner = find_owner(tensor);
  await_copies();
  if (!owner.is_sharded()) {
    tensor.copy_(given);
    return;
  }
  owner.unit->whole().take_own(owner.index, given, owner.unit->shard());
  if (owner.unit->shows()) tensor.detach().copy_(given);
}

}  // namespace tessera
