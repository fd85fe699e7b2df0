#include "fsdp/unit/unit.h"

#include <c10/util/Type.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "fsdp/unit/bucket_reducer.h"
#include "fsdp/unit/shard_reducer.h"
#include "tessera/error.h"
#include "torch/compat.h"
#include "torch/device.h"

namespace tessera::detail {
namespace {

// Rows of the gathered array begin where the allocator would put a tensor, so that kernels take
// the same paths as for a module that is not sharded.
constexpr std::int64_t kAlignmentBytes = 64;
constexpr std::int64_t kFlatAlignmentBytes = 16;  // fsdp-rows K9

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

void require_dense(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (parameter.layout() != at::kStrided)
      throw Error(ErrorCode::unsupported, "fully_shard takes dense parameters with data only");
  }
}

void require_uniform(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (parameter.scalar_type() != parameters.front().scalar_type()) {
      throw Error(ErrorCode::invalid_argument,
                  std::string("Must flatten tensors with uniform dtype but got ") +
                      c10::toString(parameters.front().scalar_type()) + " and " +
                      c10::toString(parameter.scalar_type()) +
                      ": a unit's parameters must have one dtype");
    }
  }
}

// `element_size`: of the type that gathered parameters have (fsdp-rows K9).
UnitLayout layout_of(const std::vector<Shape>& shapes, const std::vector<int>& dims,
                     const UnitSpec& spec, std::size_t element_size) {
  const auto size = static_cast<std::int64_t>(element_size);
  const int world = spec.shard->size();
  switch (spec.geometry) {
    case Geometry::rows:
      return rows_layout(shapes, world, kAlignmentBytes / size, dims,
                         /*whole_chunks=*/is_accelerator(spec.mesh.device()));
    case Geometry::flat:
      return flat_layout(shapes, world, 0);
    case Geometry::flat_original:
      return spec.flavour == Flavour::fsdp1 ? flat_layout(shapes, world, kFlatAlignmentBytes / size)
                                            : aligned_layout(shapes, world, kAlignmentBytes / size);
  }
  return {};
}

// The dimension that a parameter is sharded along (fsdp-rows F4).
int dim_of(const at::Tensor& parameter, const ShardOptions& options) {
  const int asked = options.shard_placement ? options.shard_placement(parameter).value_or(0) : 0;
  const int dim = asked < 0 ? asked + static_cast<int>(parameter.dim()) : asked;
  if (dim < 0 || dim >= parameter.dim()) {
    throw Error(ErrorCode::invalid_argument,
                "shard_placement gave dimension " + std::to_string(asked) +
                    " for a parameter of shape " + to_string(parameter.sizes().vec()));
  }
  return dim;
}

std::vector<int> dims_of(const std::vector<at::Tensor>& parameters, const ShardOptions& options,
                         int world) {
  std::vector<int> dims;
  for (const auto& parameter : parameters) {
    const int dim = dim_of(parameter, options);
    if (dim != 0 && parameter.size(dim) % world != 0) {
      throw Error(ErrorCode::unsupported, "FSDP does not support uneven sharding on dim " +
                                              std::to_string(dim) + ": " +
                                              to_string(parameter.sizes().vec()) +
                                              " (world size: " + std::to_string(world) + ")");
    }
    dims.push_back(dim);
  }
  return dims;
}

std::vector<Shape> shapes_of(const std::vector<at::Tensor>& parameters) {
  std::vector<Shape> shapes;
  for (const auto& parameter : parameters) shapes.push_back(parameter.sizes().vec());
  return shapes;
}

// FSDP1's limits.
void require_flattenable(const std::vector<at::Tensor>& parameters, const UnitSpec& spec) {
  if (spec.flavour != Flavour::fsdp1) return;
  for (const auto& parameter : parameters) {
    if (!parameter.is_floating_point())
      throw Error(ErrorCode::invalid_argument, "Cannot flatten integer dtype tensors");
    if (spec.geometry == Geometry::flat &&
        parameter.requires_grad() != parameters.front().requires_grad()) {
      throw Error(ErrorCode::invalid_argument,
                  "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`");
    }
  }
}

// Into parts of `ranks`, each of which has all parameters.
void require_divisible(int world, int ranks) {
  if (ranks == 0) return;
  if (ranks >= 1 && world % ranks == 0) return;
  throw Error(ErrorCode::invalid_argument, "reshard_after_forward=" + std::to_string(ranks) +
                                               " should be a factor of " + std::to_string(world) +
                                               ", the ranks that share the parameters");
}

void require_placeable(const UnitSpec& spec) {
  if (spec.options.layout != ShardLayout::flat || !spec.options.shard_placement) return;
  throw Error(ErrorCode::invalid_argument,
              "shard_placement chooses a dimension, and a flat layout cuts parameters along none")
      .at_key("shard_placement");
}

bool has_copies(const UnitSpec& spec) {
  return spec.replicate && spec.replicate->size() > 1;
}

std::string type_of(const torch::nn::Module& module) {
  return c10::demangle(typeid(module).name());
}

// The dtype that gradients of all of them fit into; where they stay whole there may be several
// types.
at::ScalarType common_type(const std::vector<at::Tensor>& parameters) {
  std::optional<at::ScalarType> type;
  for (const auto& parameter : parameters) {
    const auto own = parameter.scalar_type();
    if (!at::isFloatingType(own) && !at::isComplexType(own)) continue;  // never trained
    type = type ? at::promote_types(*type, own) : own;
  }
  return type.value_or(parameters.front().scalar_type());
}

// Integer parameters are never cast (fsdp-rows MP10), nor complex ones.
at::ScalarType compute_type(at::ScalarType own, const MixedPrecision& precision) {
  return c10::isFloatingType(own) ? precision.param_dtype.value_or(own) : own;
}

at::ScalarType reduce_type(at::ScalarType own, const MixedPrecision& precision) {
  const auto computed = compute_type(own, precision);
  return c10::isFloatingType(own) ? precision.reduce_dtype.value_or(computed) : computed;
}

bool has_sparse_gradients(const torch::nn::Module& module) {
  if (const auto* table = module.as<torch::nn::EmbeddingImpl>()) return table->options.sparse();
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

// The parameters that only tables with sparse gradients have, as PyTorch's DistributedDataParallel
// finds them. Other gradients of a parameter that another module has too make the sum dense.
std::vector<bool> sparse_ones(const std::vector<UnitParam>& params,
                              const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::unordered_set<const c10::TensorImpl*> sparse, dense;
  for (const auto& module : modules) {
    for (const auto& below : module->modules()) {
      auto& found = has_sparse_gradients(*below) ? sparse : dense;
      for (const auto& parameter : below->parameters(/*recurse=*/false))
        found.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<bool> flags;
  for (const auto& param : params) {
    const auto* impl = param.full.unsafeGetTensorImpl();
    flags.push_back(sparse.contains(impl) && !dense.contains(impl));
  }
  return flags;
}

void require_floating(const MixedPrecision& precision) {
  for (const auto& [name, dtype] : {std::pair("param_dtype", precision.param_dtype),
                                    {"reduce_dtype", precision.reduce_dtype},
                                    {"output_dtype", precision.output_dtype},
                                    {"buffer_dtype", precision.buffer_dtype}}) {
    if (!dtype || c10::isFloatingType(*dtype)) continue;
    throw Error(ErrorCode::invalid_argument, std::string("mixed precision in ") +
                                                 c10::toString(*dtype) +
                                                 ": expected a floating-point type")
        .at_key(name);
  }
}

}  // namespace

void require_data(const std::vector<at::Tensor>& parameters, torch::Device device) {
  for (const auto& parameter : parameters) {
    if (parameter.is_meta() && !device.is_meta())
      throw Error(ErrorCode::unsupported, "fully_shard takes dense parameters with data only");
  }
}

void require_divide_factor(double factor) {
  if (factor > 0 && std::isfinite(factor)) return;
  throw Error(ErrorCode::invalid_argument,
              "a gradient divide factor is a positive number, got " + std::to_string(factor));
}

void require_takeable(const std::vector<at::Tensor>& parameters, const UnitSpec& spec) {
  if (const auto& factor = spec.options.gradient_divide_factor) require_divide_factor(*factor);
  require_floating(spec.options.mixed_precision);
  require_placeable(spec);
  if (parameters.empty()) return;
  require_dense(parameters);
  if (!spec.shard) return;
  require_uniform(parameters);
  require_flattenable(parameters, spec);
  static_cast<void>(dims_of(parameters, spec.options, spec.shard->size()));
  require_divisible(spec.shard->size(), spec.options.reshard_after_forward_ranks);
}

Unit::Unit(std::vector<UnitModule> modules, const UnitSpec& spec,
           const std::vector<at::Tensor>& parameters)
    : mesh_(state_of(spec.shard.value_or(spec.mesh))->shared_from_this()),
      all_ranks_(state_of(spec.mesh)->shared_from_this()),
      copies_(state_of(spec.replicate.value_or(spec.mesh))->shared_from_this()),
      device_(spec.mesh.device()),
      number_(state_of(spec.mesh)->units_made++),
      is_sharded_(spec.shard.has_value()),
      is_hybrid_(spec.shard && has_copies(spec)),
      casts_root_inputs_(spec.cast_root_inputs),
      geometry_(spec.geometry),
      flavour_(spec.flavour),
      options_(spec.options),
      type_(type_of(*modules.front().module)),
      buffers_(device_, options_.mixed_precision.buffer_dtype),
      pool_(std::make_shared<StoragePool>()) {
  take_modules(std::move(modules), spec.ignored_modules);
  if (parameters.empty()) return;
  const torch::NoGradGuard no_grad;
  const auto own_type = common_type(parameters);
  for (const auto& parameter : parameters) element_count_ += parameter.numel();
  make_store(spec, parameters);
  make_reducer(spec, own_type);
  make_dead_gradients();
  set_name("");
}

void Unit::take_modules(std::vector<UnitModule> modules,
                        const std::unordered_set<const torch::nn::Module*>& ignored) {
  for (auto& [module, slot_maker] : modules) {
    for (const auto& below : module->modules()) {
      if (ignored.contains(below.get())) ignored_modules_.insert(below.get());
    }
    modules_.push_back({module, std::move(slot_maker)});
  }
}

std::vector<std::shared_ptr<torch::nn::Module>> Unit::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  for (const auto& member : modules_) {
    if (auto module = member.module.lock()) alive.push_back(std::move(module));
  }
  return alive;
}

bool Unit::is_dead() const {
  return std::ranges::all_of(modules_,
                             [](const Member& member) { return member.module.expired(); });
}

bool Unit::has_module(const torch::nn::Module* module) const {
  return std::ranges::any_of(
      modules_, [&](const Member& member) { return member.module.lock().get() == module; });
}

std::unique_ptr<torch::nn::AnyModulePlaceholder> Unit::make_slot(
    const torch::nn::Module* module) const {
  for (const auto& member : modules_) {
    if (member.slot_maker && member.module.lock().get() == module) return member.slot_maker();
  }
  return nullptr;
}

void Unit::make_store(const UnitSpec& spec, const std::vector<at::Tensor>& parameters) {
  if (!is_sharded_) {
    for (const auto& parameter : parameters) params_.push_back({parameter, parameter, {}});
    return;
  }
  const auto shapes = shapes_of(parameters);
  const auto& mesh = *spec.shard;
  const auto compute = compute_type(parameters.front().scalar_type(), options_.mixed_precision);
  store_ = std::make_unique<ParamStore>(
      layout_of(shapes, dims_of(parameters, options_, mesh.size()), spec,
                c10::elementSize(compute)),
      ParamStoreOptions{
          .rank = mesh.rank(),
          .transport = state_of(mesh)->transport.get(),
          .device = spec.mesh.device(),
          .shard_device = options_.offload_to_cpu ? torch::Device(at::kCPU) : spec.mesh.device(),
          .compute = compute},
      parameters);
  open_parking(spec, shapes);
  store_->take_over(parameters);
  changes_ = ShardChanges(store_.get());
  auto locals = make_locals(parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    params_.push_back({parameters[i], std::move(locals[i]), {}});
}

// The tensors that the optimizer works on, one a parameter.
std::vector<at::Tensor> Unit::make_locals(const std::vector<at::Tensor>& parameters) const {
  if (is_flat()) {
    const auto flat = store_->shard().view({-1}).detach();
    flat.set_requires_grad(parameters.front().requires_grad());
    return std::vector<at::Tensor>(parameters.size(), flat);
  }
  std::vector<at::Tensor> locals;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    locals.push_back(store_->local(i).set_requires_grad(parameters[i].requires_grad()));
  return locals;
}

void Unit::open_parking(const UnitSpec& spec, const std::vector<Shape>& shapes) {
  const int ranks = options_.reshard_after_forward_ranks;
  const int world = spec.shard->size();
  if (ranks == 0 || ranks == world) return;
  if (ranks == 1) {
    log_of_all(LogLevel::warning, "reshard_after_forward=1 keeps all parameters, as false does");
    options_.reshard_after_forward = false;
    return;
  }
  const auto part = spec.shard->split(ranks).shard;
  store_->open_parking(geometry_ == Geometry::rows ? rows_layout(shapes, ranks, 1)
                                                   : over_fewer_ranks(store_->layout(), ranks),
                       part.rank(), *state_of(part)->transport);
}

std::int64_t Unit::held_from(std::size_t index) const {
  const auto& layout = store_->layout();
  const auto& slice = layout.parts[store_->rank()][index].slice;
  if (const auto* box = std::get_if<Box>(&slice)) return box->offsets[layout.params[index].dim];
  return std::get<FlatRange>(slice).begin;
}

Placement Unit::placement_of(std::size_t index) const {
  const auto& layout = store_->layout();
  const auto& param = layout.params[index];
  Placement placement{.parts = mesh().size()};
  if (geometry() == Geometry::rows) {
    placement.dim = param.dim;
  } else {
    placement.shard = layout.shard_elements;
    placement.begin = param.gathered_offset;
  }
  return placement;
}

void Unit::make_reducer(const UnitSpec& spec, at::ScalarType parameter_type) {
  const int ranks = spec.mesh.size();
  const auto dtype = reduce_type(parameter_type, options_.mixed_precision);
  const double divisor = options_.gradient_divide_factor.value_or(ranks);
  if (!store_) {
    auto buckets = make_buckets(spec, dtype, divisor);
    buckets_ = buckets.get();
    reducer_ = std::move(buckets);
    return;
  }
  reducer_ = std::make_unique<ShardReducer>(
      params_, *store_,
      ShardReducerOptions{
          .shard_world = spec.shard->size(),
          .replicas = has_copies(spec) ? state_of(*spec.replicate)->transport.get() : nullptr,
          .dtype = dtype,
          .kept_dtype = options_.mixed_precision.keep_low_precision_grads
                            ? compute_type(parameter_type, options_.mixed_precision)
                            : parameter_type,
          .divisor = divisor,
          .geometry = geometry_,
          .flavour = flavour_});
}

std::unique_ptr<BucketReducer> Unit::make_buckets(const UnitSpec& spec, at::ScalarType dtype,
                                                  double divisor) {
  const auto mesh = spec.replicate.value_or(spec.mesh);
  // FSDP1 has flat gradients.
  const bool may_be_sparse = !is_fsdp1();
  return std::make_unique<BucketReducer>(
      params_, BucketReducerOptions{.ranks = spec.mesh.size(),
                                    .mesh = mesh,
                                    .transport = state_of(mesh)->transport.get(),
                                    .buckets = spec.buckets,
                                    .sparse = may_be_sparse ? sparse_ones(params_, modules())
                                                            : std::vector<bool>(params_.size()),
                                    .dtype = dtype,
                                    .divisor = divisor});
}

void Unit::make_dead_gradients() {
  if (!store_) return;
  const auto& layout = store_->layout();
  dead_ = at::empty({layout.gathered_elements}, params_.front().full.options());
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto& place = layout.params[i];
    params_[i].dead_grad =
        dead_.narrow(0, place.gathered_offset, place.elements)
            .view(place.shape)
            .detach();  // a view could not be detached in place, as zero_grad does
  }
  StoragePool().take(storage_of(dead_));
}

void Unit::set_name(std::string name) {
  name_ = std::move(name);
  if (!store_) return;
  const auto unit = "unit '" + name_ + "' (" + type_ + ")";
  store_->set_label("unit " + std::to_string(number_) + " '" + name_ + "'");
  bypass_text_ =
      "tessera: parameters of " + unit +
      " were used while they are sharded: a call went past fully_shard. Call the module "
      "through a TESSERA_MODULE holder or tessera::call_module(module, ...), not "
      "module->forward(...), and the model first: what no unit inside holds is gathered by the "
      "model's own call; one that an AnyModule or a module of libtorch's own calls "
      "cannot be a unit, the module around it can; give optimizers sharded_parameters(model), not "
      "model->parameters()";
  if (is_fsdp1())
    bypass_text_ += "; what an auto_wrap_policy chose and nobody calls so is for it to leave out";
  graph_text_ =
      "gradients of gradients (create_graph, as of a gradient penalty) went through " + unit +
      ", whose parameters are sharded again by then. They are right where parameters stay "
      "gathered (reshard_after_forward and reshard_after_backward false), and with "
      "replicate";
  if (param_state_ != ParamState::full) forbid_access();
  compat::forbid_access(
      storage_of(dead_),
      "tessera: a gradient was read from the module's own parameters in " + unit +
          ". Gradients of a sharded module are in sharded_parameters(model); make "
          "optimizers from those");
}

void Unit::note(TraceStep step) const {
  if (!trace) return;
  trace->push_back({step, name_, whole_bytes(), std::chrono::steady_clock::now()});
}

void Unit::start_gather(bool may_change) {
  if (!is_away()) return;
  if (param_state_ == ParamState::shown) {
    throw Error(ErrorCode::invalid_argument,
                "a forward of unit '" + name_ + "' while its parameters are shown whole");
  }
  if (store_) {
    note(TraceStep::start_gather);
    store_->start_gather(pool_, may_change);
    changes_.note_gather();
    ++gathers;
  }
  param_state_ = next(param_state_, ParamStep::start_gather);
}

void Unit::gather() {
  if (param_state_ == ParamState::full) return;
  start_gather();
  if (store_) {
    note(TraceStep::wait_gather);
    store_->finish_gather();
    note(TraceStep::finish_gather);
  }
  param_state_ = next(param_state_, ParamStep::finish_gather);
}

void Unit::free() {
  if (is_one_of(param_state_, ParamState::sharded, ParamState::shown)) return;
  if (store_) drop_gathered();
  if (param_state_ == ParamState::gathering)
    param_state_ = next(param_state_, ParamStep::finish_gather);
  param_state_ = next(param_state_, ParamStep::free);
}

void Unit::forbid_access() {
  store_->forbid_access(has_graph_of_backward_ ? "tessera: " + graph_text_ : bypass_text_);
}

// Drops what is there, on its way or parked.
void Unit::drop_gathered() {
  if (param_state_ == ParamState::gathering) {
    store_->drop_gather(*pool_);
    note(TraceStep::finish_gather);
  } else if (param_state_ == ParamState::full) {
    store_->free(*pool_);
    forbid_access();
  }
  store_->unpark();
  if (!is_away()) note(TraceStep::free);
}

void Unit::park() {
  if (!store_ || !store_->has_parking() || param_state_ != ParamState::full) return free();
  store_->park(*pool_);
  forbid_access();
  note(TraceStep::free);
  param_state_ = next(param_state_, ParamStep::park);
}

void Unit::wrap_channel(const ChannelWrapper& wrap) {
  free();
  store_->wrap_channel(wrap);
}

void Unit::show(const at::Tensor& array, bool keeps) {
  if (param_state_ == ParamState::shown)
    throw Error(ErrorCode::invalid_argument, "its parameters are shown whole already")
        .at_key(name_);
  free();
  param_state_ = next(param_state_, ParamStep::show);
  if (!array.defined()) return;
  for (std::size_t i = 0; i < params_.size(); ++i)
    replace_data(params_[i].full, whole().view(array, i));
  if (keeps) kept_ = shard().clone();
}

void Unit::hide() {
  param_state_ = next(param_state_, ParamStep::hide);
  kept_ = at::Tensor();
  for (std::size_t i = 0; i < params_.size(); ++i) replace_data(params_[i].full, store_->full(i));
}

bool Unit::shows() const {
  return param_state_ == ParamState::shown && !store_->owns(params_.front().full);
}

bool Unit::computes_in_own_type() const {
  if (!store_ || !options_.mixed_precision.full_precision_in_eval) return false;
  const auto first = module();
  return first && !first->is_training() &&
         params_.front().local.scalar_type() !=
             compute_type(params_.front().local.scalar_type(), options_.mixed_precision);
}

void Unit::show_own_type() {
  if (torch::GradMode::is_enabled()) {
    throw Error(ErrorCode::unsupported,
                "full_precision_in_eval is for forwards without gradients; use torch::NoGradGuard")
        .at_key(name_);
  }
  note(TraceStep::start_gather);
  show(whole().gather());
  note(TraceStep::finish_gather);
  ++gathers;
  is_shown_in_own_type_ = true;
}

void Unit::hide_own_type() {
  if (!std::exchange(is_shown_in_own_type_, false)) return;
  hide();
  note(TraceStep::free);
}

std::uint64_t Unit::gathered_bytes() const {
  return store_ ? store_->gathered_bytes() : 0;
}

std::uint64_t Unit::whole_bytes() const {
  return store_ ? store_->whole_bytes() : 0;
}

std::uint64_t Unit::shard_bytes() const {
  if (store_) return store_->shard().nbytes();
  std::uint64_t bytes = 0;
  for (const auto& param : params_) bytes += param.full.nbytes();
  return bytes;
}

}  // namespace tessera::detail
