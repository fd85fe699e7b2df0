#include "fsdp/unit.h"

#include <c10/util/Type.h>
#include <torch/torch.h>

#include <utility>

#include "fsdp/quiet_copy.h"
#include "tessera/error.h"
#include "torch/compat.h"
#include "torch/mesh_state.h"

namespace tessera::detail {
namespace {

// Rows of the gathered array begin where the allocator would put a tensor, so that kernels take
// the same paths as for a module that is not sharded.
constexpr std::int64_t kAlignmentBytes = 64;

Shape shape_of(const at::Tensor& tensor) {
  return tensor.sizes().vec();
}

c10::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

void require_uniform(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (parameter.layout() != at::kStrided || parameter.is_meta()) {
      throw Error(ErrorCode::unsupported, "fully_shard takes dense parameters with data only");
    }
    if (parameter.scalar_type() != parameters.front().scalar_type()) {
      throw Error(ErrorCode::invalid_argument,
                  std::string("a unit's parameters must have one dtype, found ") +
                      c10::toString(parameters.front().scalar_type()) + " and " +
                      c10::toString(parameter.scalar_type()));
    }
  }
}

}  // namespace

Unit::Unit(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh,
           std::vector<at::Tensor> parameters, std::optional<bool> reshard)
    : reshard_after_forward(reshard),
      module_(module),
      mesh_(mesh.state()),
      rank_(mesh.rank()),
      world_(mesh.size()),
      type_(c10::demangle(typeid(*module).name())),
      pool_(std::make_shared<StoragePool>()) {
  if (parameters.empty()) return;
  require_uniform(parameters);
  torch::NoGradGuard no_grad;
  take_over(parameters);
  make_dead_gradients();
  set_name("");
}

void Unit::take_over(const std::vector<at::Tensor>& parameters) {
  std::vector<Shape> shapes;
  for (const auto& parameter : parameters) shapes.push_back(shape_of(parameter));
  const auto options = parameters.front().options().device(mesh().device()).requires_grad(false);
  layout_ = make_flat_layout(shapes, world_, kAlignmentBytes / parameters.front().element_size());
  channel_ = mesh().state()->transport->open(layout_.shard_elements, options);
  gathered_ = at::empty({layout_.gathered_elements}, options);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& place = layout_.entries[i];
    const auto& whole = parameters[i];
    UnitParam param{whole, {}, {}, place};
    auto shape = shapes[i];
    shape[0] = place.row_count(rank_);
    param.local =
        channel_->shard().narrow(0, place.shard_offset, shape[0] * place.row).view(shape).detach();
    param.local.copy_(whole.narrow(0, place.first_row(rank_), shape[0]));
    param.local.set_requires_grad(whole.requires_grad());
    whole.set_data(
        gathered_.narrow(0, place.gathered_offset, place.rows * place.row).view(shapes[i]));
    whole.mutable_grad() = at::Tensor();
    params_.push_back(std::move(param));
  }
  StoragePool().take(storage_of(gathered_));
}

void Unit::make_dead_gradients() {
  dead_ = at::empty({layout_.gathered_elements}, gathered_.options());
  for (auto& param : params_) {
    param.dead_grad =
        dead_.narrow(0, param.place.gathered_offset, param.place.rows * param.place.row)
            .view(param.full.sizes())
            .detach();  // a view could not be detached in place, as zero_grad does
  }
  StoragePool().take(storage_of(dead_));
}

void Unit::set_name(std::string name) {
  name_ = std::move(name);
  const auto unit = "unit '" + name_ + "' (" + type_ + ")";
  bypass_text_ = "tessera: parameters of " + unit +
                 " were used while they are sharded: a call went past fully_shard. Call the module "
                 "through a TESSERA_MODULE holder or tessera::call(module, ...), not "
                 "module->forward(...); give optimizers sharded_parameters(model), not "
                 "model->parameters()";
  if (param_state_ != ParamState::full) forbid_access();
  if (!dead_.defined()) return;
  compat::forbid_access(
      storage_of(dead_),
      "tessera: a gradient was read from the module's own parameters in " + unit +
          ". Gradients of a sharded module are in sharded_parameters(model); make "
          "optimizers from those");
}

Mesh Unit::mesh() const {
  auto state = mesh_.lock();
  if (!state) throw Error(ErrorCode::invalid_argument, "the mesh of a sharded module is gone");
  return Mesh(std::move(state));
}

void Unit::forbid_access() {
  if (gathered_.defined()) compat::forbid_access(storage_of(gathered_), bypass_text_);
}

void Unit::start_gather() {
  if (param_state_ != ParamState::sharded) return;
  if (channel_) channel_->start_gather();
  param_state_ = next(param_state_, ParamStep::start_gather);
  ++gathers;
}

void Unit::gather() {
  if (param_state_ == ParamState::full) return;
  start_gather();
  if (channel_) {
    // Memory is taken when the shards are here: a prefetched unit costs its buffers only.
    channel_->finish_gather([&](int rank, const at::Tensor& shard) {
      if (!has_memory()) allocate();
      copy_shard(rank, shard);
    });
  }
  param_state_ = next(param_state_, ParamStep::finish_gather);
}

bool Unit::has_memory() const {
  return gathered_.defined() &&
         storage_of(gathered_)._mutable_data_ptr_no_checks().get() != nullptr;
}

void Unit::allocate() {
  auto& storage = storage_of(gathered_);
  compat::allow_access(storage);
  pool_->give(storage);
}

void Unit::copy_shard(int rank, const at::Tensor& shard) {
  for (const auto& place : layout_.entries) {
    copy_quietly(gathered_, place.gathered_offset + place.first_row(rank) * place.row, shard,
                 place.shard_offset, place.row_count(rank) * place.row);
  }
}

void Unit::free() {
  if (param_state_ == ParamState::sharded) return;
  if (param_state_ == ParamState::gathering) {
    if (channel_) channel_->finish_gather([](int, const at::Tensor&) {});
    param_state_ = next(param_state_, ParamStep::finish_gather);
  } else if (channel_) {
    pool_->take(storage_of(gathered_));
    forbid_access();
  }
  param_state_ = next(param_state_, ParamStep::free);
}

std::uint32_t Unit::shard_version() const {
  return channel_ ? static_cast<std::uint32_t>(channel_->shard()._version()) : 0;
}

std::uint64_t Unit::gathered_bytes() const {
  return has_memory() ? gathered_.storage().nbytes() : 0;
}
std::uint64_t Unit::shard_bytes() const {
  return channel_ ? channel_->shard().nbytes() : 0;
}
std::int64_t Unit::element_count() const noexcept {
  std::int64_t count = 0;
  for (const auto& place : layout_.entries) count += place.rows * place.row;
  return count;
}

}  // namespace tessera::detail
