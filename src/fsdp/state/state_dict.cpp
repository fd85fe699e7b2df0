#include "fsdp/state/state_dict.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <unordered_map>

#include <torch/torch.h>

#include "base/log.h"
#include "fsdp/state/model_state.h"
#include "fsdp/state/sharded_load.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::ShardedLoad;
using detail::Unit;
using detail::units_without_chunks;
using Pairs = std::vector<Value::Pair>;

void require_possible(const StateDictOptions& options) {
  if ((options.rank0_only || options.optim.rank0_only) && options.type != StateDictType::full)
    throw Error(ErrorCode::invalid_argument,
                "rank0_only is an option of the full state dict alone");
}

// There is one kind only if nothing is sharded.
StateDictType kind_of(ModuleRef module, const StateDictOptions& options) {
  if (options.type == StateDictType::full) return options.type;
  const auto units = detail::units_below(module.get());
  const bool any =
      std::ranges::any_of(units, [](const auto& named) { return named.second->is_sharded(); });
  if (any || units.empty()) return options.type;
  log_of_all(LogLevel::warning,
             "When using `NO_SHARD` for `ShardingStrategy`, full_state_dict will be returned.");
  return StateDictType::full;
}

// This rank's part of a unit's flat parameter, without what fills the array up.
Tensor flat_leaf(Unit& unit) {
  const auto& layout = unit.layout();
  const auto& last = layout.params.back();
  const auto elements = unit.geometry() == detail::Geometry::flat
                            ? last.gathered_offset + last.elements
                            : layout.gathered_elements;
  const auto begin = std::min(unit.mesh().rank() * layout.shard_elements, elements);
  const auto count = std::min(layout.shard_elements, elements - begin);
  unit.changes().hand_out();
  return flat_leaf_of(unit.shard().narrow(0, 0, count), {elements}, begin);
}

// Leaves of the parameters and buffers that this rank has whole.
Pairs whole_leaves(const torch::nn::Module& module) {
  Pairs pairs;
  for (const auto& [name, tensor] : detail::state_entries(module)) {
    if (!detail::find_owner(tensor).is_sharded()) pairs.emplace_back(name, leaf_of(tensor));
  }
  return pairs;
}

Value local_state(const torch::nn::Module& module) {
  auto pairs = whole_leaves(module);
  for (const auto& [name, unit] : detail::units_below(module)) {
    if (!unit->has_shards()) continue;
    if (!unit->is_fsdp1()) {
      throw Error(ErrorCode::invalid_argument,
                  "local_state_dict can only be called when parameters are flatten and sharded.")
          .at_key(name);
    }
    pairs.emplace_back(detail::flat_param_name(name), flat_leaf(*unit));
  }
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

Value full_state(ModuleRef module, const StateDictOptions& options) {
  Pairs pairs;
  const FullState whole = full_state_dict(
      module, {.rank0_only = options.rank0_only, .offload_to_cpu = options.offload_to_cpu});
  for (const auto& entry : whole) pairs.emplace_back(entry.key(), leaf_of(entry.value()));
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

// This rank's chunk of a gathered parameter, copied.
Tensor own_chunk(const at::Tensor& whole, const Mesh& mesh) {
  const auto shape = whole.sizes().vec();
  const auto box = detail::chunk_of(shape, mesh.size(), mesh.rank());
  const auto rows = whole.narrow(0, box.offsets[0], box.sizes[0])
                        .to(at::kCPU, whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  return detail::chunk_leaf(rows, shape, box);
}

// The chunks, keyed by the module's tensor.
std::unordered_map<const c10::TensorImpl*, Tensor> gathered_chunks(
    const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, Tensor> chunks;
  for (const auto& unit : units_without_chunks(module)) {
    unit->adopt_replaced();
    const auto whole = unit->whole().gather();
    for (std::size_t i = 0; i < unit->params().size(); ++i) {
      chunks.emplace(unit->params()[i].full.unsafeGetTensorImpl(),
                     own_chunk(unit->whole().view(whole, i), unit->mesh()));
    }
  }
  return chunks;
}

Value sharded_state(ModuleRef module) {
  const torch::NoGradGuard no_grad;
  const auto chunks = gathered_chunks(module.get());
  if (chunks.empty()) return model_state(module);
  Pairs pairs;
  for (const auto& [name, tensor] : detail::state_entries(module.get())) {
    const auto chunk = chunks.find(tensor.unsafeGetTensorImpl());
    pairs.emplace_back(name, chunk != chunks.end() ? chunk->second : detail::own_leaf(tensor));
  }
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

// A rank whose state does not fit says so to the others, which would wait for its chunks.
template <typename Work>
void agreed(const Mesh& mesh, Work&& work) {
  std::exception_ptr mine;
  try {
    agree(mesh.group(), "loading a sharded state", [&] {
      try {
        work();
      } catch (...) {
        mine = std::current_exception();
        throw;
      }
    });
  } catch (...) {
    if (mine) std::rethrow_exception(mine);
    throw;
  }
}

void load_sharded(ModuleRef module, const Value& state) {
  const auto flat = units_without_chunks(module.get());
  std::optional<ShardedLoad> load;
  const auto plan = [&] { load.emplace(module.get(), state, detail::Names::same); };
  if (flat.empty()) {
    plan();
  } else {
    agreed(flat.front()->mesh(), plan);
  }
  load->apply();
}

}  // namespace

void set_state_dict_type(ModuleRef module, const StateDictOptions& options) {
  require_possible(options);
  for (const auto& [name, unit] : detail::units_below(module.get()))
    unit->state_dict_options = options;
}

StateDictOptions get_state_dict_type(ModuleRef module) {
  const auto units = detail::units_below(module.get());
  if (units.empty()) return {};
  const auto& first = units.front().second->state_dict_options;
  for (const auto& [name, unit] : units) {
    if (unit->state_dict_options == first) continue;
    throw Error(ErrorCode::invalid_argument,
                unit->state_dict_options.type == first.type
                    ? "All FSDP modules should have the same type of state_dict_config."
                    : "All FSDP module should the same state_dict_type.")
        .at_key(name);
  }
  return first;
}

StateDictTypeScope::StateDictTypeScope(ModuleRef module, const StateDictOptions& options) {
  require_possible(options);
  for (const auto& [name, unit] : detail::units_below(module.get()))
    before_.emplace_back(unit, std::exchange(unit->state_dict_options, options));
}

StateDictTypeScope::~StateDictTypeScope() {
  for (const auto& [weak, options] : before_) {
    if (const auto unit = weak.lock()) unit->state_dict_options = options;
  }
}

Value state_dict(ModuleRef module) {
  const auto options = get_state_dict_type(module);
  detail::refresh_units(module.get());
  switch (kind_of(module, options)) {
    case StateDictType::full:
      return full_state(module, options);
    case StateDictType::local:
      return local_state(module.get());
    case StateDictType::sharded:
      break;
  }
  return sharded_state(module);
}

void load_state_dict(ModuleRef module, const Value& state) {
  const auto options = get_state_dict_type(module);
  const auto kind = kind_of(module, options);
  detail::refresh_units(module.get());
  if (kind == StateDictType::local) return ShardedLoad(local_state(module.get()), state).apply();
  if (kind == StateDictType::sharded) return load_sharded(module, state);
  FullState whole;
  for (const auto& [name, value] : state.pairs())
    whole.insert(name.as_string(), tensor_of(value.as_tensor()));
  load_full_state_dict(module, whole);
}

std::vector<ShardMetadata> shard_metadata(const std::vector<std::int64_t>& shape, int ranks) {
  if (shape.empty() || ranks < 1) {
    throw Error(ErrorCode::invalid_argument, "chunks of a tensor without dimensions, or over " +
                                                 std::to_string(ranks) + " ranks");
  }
  std::vector<ShardMetadata> chunks;
  for (int rank = 0; rank < ranks; ++rank) {
    auto box = detail::chunk_of(shape, ranks, rank);
    ShardMetadata chunk{std::move(box.offsets), std::move(box.sizes), rank};
    if (chunk.sizes[0] > 0) chunks.push_back(std::move(chunk));
  }
  return chunks;
}

}  // namespace tessera
