#include "tessera/pytorch/state_dict.h"
#include "fsdp/state/model_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <unordered_set>

#include "base/log.h"
#include "fsdp/state/redistribute.h"
#include "fsdp/state/state_entries.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "tessera/pytorch/full_params.h"
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
  unit.changes().hand_out();
  return flat_leaf_of(unit.shard().narrow(0, 0, count), {elements}, begin);
}

// Of parameters and buffers that this rank has whole.
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
    if (unit->geometry() == detail::Geometry::rows) {
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

struct Copy {
  at::Tensor to, from;
};

void require_shape(const std::string& name, const Tensor& mine, const Tensor& given) {
  if (given.shape == mine.shape) return;
  throw Error(ErrorCode::mismatch, "the state has shape " + to_string(given.shape) +
                                       ", the module " + to_string(mine.shape))
      .at_key(name);
}

// The piece of `given` that lies where `piece` does.
const Piece& same_piece(const std::string& name, const Piece& piece, const Tensor& given) {
  const auto same = std::ranges::find_if(given.pieces, [&](const Piece& other) {
    return other.slice == piece.slice && other.storage != nullptr;
  });
  if (same != given.pieces.end()) return *same;
  throw Error(ErrorCode::mismatch,
              "the state has no part that is this rank's: it was made by other ranks or another "
              "kind of sharding; load it through a checkpoint")
      .at_key(name);
}

// What `given` has for each piece of `mine`.
void plan(const std::string& name, const Tensor& mine, const Tensor& given,
          std::vector<Copy>& copies) {
  require_shape(name, mine, given);
  for (const auto& piece : mine.pieces) {
    copies.push_back({detail::tensor_of_piece(mine, piece),
                      detail::tensor_of_piece(given, same_piece(name, piece, given))});
  }
}

// What `given` has for the only piece of `mine`; undefined when there is none.
at::Tensor piece_for(const std::string& name, const Tensor& mine, const Tensor& given) {
  require_shape(name, mine, given);
  if (mine.pieces.empty()) return {};
  return detail::tensor_of_piece(given, same_piece(name, mine.pieces.front(), given));
}

void require_no_more(const std::unordered_set<std::string>& known, const Value& state) {
  for (const auto& [name, value] : state.pairs()) {
    if (!known.contains(name.as_string()))
      throw Error(ErrorCode::mismatch, "the module lacks this name").at_key(name.as_string());
  }
}

const Value& entry_of(const Value& state, const std::string& name) {
  const auto* given = state.find(name);
  if (given == nullptr) throw Error(ErrorCode::mismatch, "the state lacks this name").at_key(name);
  return *given;
}

void load_parts(const Value& mine, const Value& state) {
  std::vector<Copy> copies;
  std::unordered_set<std::string> known;
  for (const auto& [key, value] : mine.pairs()) {
    const auto name = key.as_string();
    known.insert(name);
    plan(name, value.as_tensor(), entry_of(state, name).as_tensor(), copies);
  }
  require_no_more(known, state);
  const torch::NoGradGuard no_grad;
  for (auto& copy : copies) copy.to.copy_(copy.from);
}

// Units whose sharded kind is gathered: FSDP1's, of which a rank holds other parts than chunks.
bool holds_no_chunks(const Unit& unit) {
  return unit.has_shards() && unit.geometry() != detail::Geometry::rows;
}

std::vector<std::shared_ptr<Unit>> units_without_chunks(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> found;
  for (auto& [name, unit] : detail::units_below(module)) {
    if (holds_no_chunks(*unit)) found.push_back(std::move(unit));
  }
  return found;
}

// What this rank's chunk of a gathered parameter is, copied.
Tensor own_chunk(const at::Tensor& whole, const Mesh& mesh) {
  const auto shape = whole.sizes().vec();
  const auto box = detail::chunk_of(shape, mesh.size(), mesh.rank());
  const auto rows = whole.narrow(0, box.offsets[0], box.sizes[0])
                        .to(at::kCPU, whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  return detail::chunk_leaf(rows, shape, box);
}

// By the module's tensor.
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

// What a sharded state brings: copies into this rank's own memory, and for each flat unit the
// chunks of its parameters.
struct ShardedLoad {
  std::vector<Copy> copies;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> chunks;  // undefined: none on this rank
};

at::Tensor given_chunk(const std::string& name, const at::Tensor& parameter, const Unit& unit,
                       const Tensor& given) {
  Tensor mine;
  mine.shape = parameter.sizes().vec();
  const auto mesh = unit.mesh();
  const auto box = detail::chunk_of(mine.shape, mesh.size(), mesh.rank());
  if (numel(box) > 0) mine.pieces.push_back({box, nullptr, 0, {}, -1});
  return piece_for(name, mine, given);
}

ShardedLoad plan_sharded(const torch::nn::Module& module, const Value& state) {
  ShardedLoad load;
  std::unordered_set<std::string> known;
  for (const auto& [name, tensor] : detail::state_entries(module)) {
    known.insert(name);
    const auto& given = entry_of(state, name).as_tensor();
    const auto owner = detail::find_owner(tensor);
    if (owner.unit && holds_no_chunks(*owner.unit)) {
      load.chunks[tensor.unsafeGetTensorImpl()] = given_chunk(name, tensor, *owner.unit, given);
    } else {
      plan(name, detail::own_leaf(tensor), given, load.copies);
    }
  }
  require_no_more(known, state);
  return load;
}

// This rank's chunks, as `rows` has them.
at::Tensor joined_chunks(const Unit& unit, const UnitLayout& rows, const ShardedLoad& load) {
  const auto mine = at::zeros({rows.shard_elements}, unit.shard().options());
  for (std::size_t i = 0; i < unit.params().size(); ++i) {
    const auto& chunk = load.chunks.at(unit.params()[i].full.unsafeGetTensorImpl());
    if (!chunk.defined()) continue;
    mine.narrow(0, rows.parts[unit.mesh().rank()][i].base, chunk.numel())
        .copy_(chunk.contiguous().view({-1}));
  }
  return mine;
}

// Each rank takes its own parts out of the chunks of all.
void load_chunks(const Unit& unit, const ShardedLoad& load) {
  std::vector<Shape> shapes;
  for (const auto& place : unit.layout().params) shapes.push_back(place.shape);
  const auto mesh = unit.mesh();
  const auto rows = rows_layout(shapes, mesh.size(), 1);
  const auto all = unit.whole().exchange(joined_chunks(unit, rows, load));
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    detail::redistribute(shapes[i], all, parts_of(rows, i), unit.shard(),
                         part_of(unit, i, mesh.rank()));
  }
  // Nothing of this tells autograd, nor the unit that its shard has changed.
  torch::autograd::impl::bump_version(unit.shard());
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
  ShardedLoad load;
  const auto make_plan = [&] { load = plan_sharded(module.get(), state); };
  if (flat.empty()) {
    make_plan();
  } else {
    agreed(flat.front()->mesh(), make_plan);
  }
  const torch::NoGradGuard no_grad;
  for (auto& copy : load.copies) copy.to.copy_(copy.from);
  for (const auto& unit : flat) load_chunks(*unit, load);
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
  if (kind == StateDictType::local) return load_parts(local_state(module.get()), state);
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
