#include "tessera/state_dict.h"

#include <torch/torch.h>

#include <algorithm>
#include <unordered_set>

#include "base/log.h"
#include "fsdp/registry.h"
#include "fsdp/state_entries.h"
#include "tessera/error.h"
#include "tessera/full_params.h"
#include "tessera/train_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::Unit;
using Pairs = std::vector<Value::Pair>;

void require_possible(const StateDictOptions& options) {
  if ((options.rank0_only || options.optim.rank0_only) && options.type != StateDictType::full)
    throw Error(ErrorCode::invalid_argument,
                "rank0_only is an option of the full state dict alone");
}

// Where nothing is sharded there is one kind only.
StateDictType kind_of(ModuleRef module, const StateDictOptions& options) {
  if (options.type == StateDictType::full) return options.type;
  const auto units = detail::units_below(module.get());
  const bool any =
      std::ranges::any_of(units, [](const auto& named) { return named.second->is_sharded(); });
  if (any || units.empty()) return options.type;
  log(LogLevel::warning,
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
  unit.hand_out();
  return flat_leaf_of(unit.shard().narrow(0, 0, count), {elements}, begin);
}

Value local_state(const torch::nn::Module& module) {
  Pairs pairs;
  std::unordered_set<const Unit*> seen;
  for (const auto& [name, tensor] : detail::state_entries(module)) {
    const auto owner = detail::find_owner(tensor);
    if (!owner.unit || !owner.unit->is_sharded()) pairs.emplace_back(name, leaf_of(tensor));
  }
  for (const auto& [name, unit] : detail::units_below(module)) {
    if (!unit->is_sharded() || unit->params().empty()) continue;
    if (unit->geometry() == detail::Geometry::rows) {
      throw Error(ErrorCode::invalid_argument,
                  "local_state_dict can only be called when parameters are flatten and sharded.")
          .at_key(name);
    }
    pairs.emplace_back(name.empty() ? "_flat_param" : name + "._flat_param", flat_leaf(*unit));
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

// One piece as a tensor over its memory.
at::Tensor tensor_of_piece(const Tensor& leaf, const Piece& piece) {
  Tensor part;
  part.dtype = leaf.dtype;
  part.shape = std::get<Box>(piece.slice).sizes;
  part.pieces = {piece};
  std::get<Box>(part.pieces.front().slice).offsets.assign(part.shape.size(), 0);
  return tensor_of(part);
}

struct Copy {
  at::Tensor to, from;
};

// What `given` has for each piece of `mine`.
void plan(const std::string& name, const Tensor& mine, const Tensor& given,
          std::vector<Copy>& copies) {
  if (given.shape != mine.shape) {
    throw Error(ErrorCode::mismatch, "the state has shape " + to_string(given.shape) +
                                         ", the module " + to_string(mine.shape))
        .at_key(name);
  }
  for (const auto& piece : mine.pieces) {
    const auto same = std::ranges::find_if(given.pieces, [&](const Piece& other) {
      return other.slice == piece.slice && other.storage != nullptr;
    });
    if (same == given.pieces.end()) {
      throw Error(
          ErrorCode::mismatch,
          "the state has no part that is this rank's: it was made by other ranks or another "
          "kind of sharding; load it through a checkpoint")
          .at_key(name);
    }
    copies.push_back({tensor_of_piece(mine, piece), tensor_of_piece(given, *same)});
  }
}

void require_no_more(const Value& mine, const Value& state) {
  for (const auto& [name, value] : state.pairs()) {
    if (mine.find(name.as_string()) == nullptr)
      throw Error(ErrorCode::mismatch, "the module lacks this name").at_key(name.as_string());
  }
}

void load_parts(const Value& mine, const Value& state) {
  std::vector<Copy> copies;
  for (const auto& [key, value] : mine.pairs()) {
    const auto name = key.as_string();
    const auto* given = state.find(name);
    if (given == nullptr)
      throw Error(ErrorCode::mismatch, "the state lacks this name").at_key(name);
    plan(name, value.as_tensor(), given->as_tensor(), copies);
  }
  require_no_more(mine, state);
  const torch::NoGradGuard no_grad;
  for (auto& copy : copies) copy.to.copy_(copy.from);
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
  switch (kind_of(module, options)) {
    case StateDictType::full:
      return full_state(module, options);
    case StateDictType::local:
      return local_state(module.get());
    case StateDictType::sharded:
      break;
  }
  return model_state(module);
}

void load_state_dict(ModuleRef module, const Value& state) {
  const auto options = get_state_dict_type(module);
  const auto kind = kind_of(module, options);
  if (kind != StateDictType::full)
    return load_parts(
        kind == StateDictType::local ? local_state(module.get()) : model_state(module), state);
  FullState whole;
  for (const auto& [name, value] : state.pairs())
    whole.insert(name.as_string(), tensor_of(value.as_tensor()));
  load_full_state_dict(module, whole);
}

}  // namespace tessera
