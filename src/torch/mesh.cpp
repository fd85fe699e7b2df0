#include "tessera/mesh.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"
#include "comm/launcher.h"
#include "tessera/error.h"
#include "torch/backends.h"
#include "torch/c10_error.h"
#include "torch/device.h"
#include "torch/mesh_state.h"
#include "torch/rendezvous.h"
#include "torch/tensor.h"
#include "torch/torch_group.h"
#include "torch/transport.h"

namespace tessera {
namespace {

torch::Device device_of(const MeshOptions& options, int rank, int local_rank) {
  if (!options.device) return default_device(local_rank);
  const auto type = options.device->type();
  return resolve_device(*options.device, rank, [&] {
    if (!c10::impl::hasDeviceGuardImpl(type)) {
      throw Error(ErrorCode::unsupported,
                  "this libtorch has no devices of type " + c10::DeviceTypeName(type, true));
    }
    return static_cast<int>(c10::impl::VirtualGuardImpl(type).getDevice().index());
  });
}

// What a user's program makes on "the" device of this type is made on the mesh's, as after
// torch.cuda.set_device(local_rank).
void make_current(torch::Device device) {
  if (!is_accelerator(device)) return;
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

// For the handles of a program, to tell them from the units that keep the same state: with the last
// handle those units go that nobody else would find dead.
std::shared_ptr<detail::MeshState> make_state() {
  auto state = std::make_shared<detail::MeshState>();
  auto* const plain = state.get();
  return {plain, [state = std::move(state)](detail::MeshState*) mutable {
            const auto last = std::move(state);
            detail::forget_dead_units(*last);
          }};
}

// Before there are connections.
void begin(detail::MeshState& state, int rank, int size, const MeshOptions& options) {
  settle_vector_math();
  state.rank = rank;
  state.size = size;
  state.local_rank = local_rank_of();
  state.device = device_of(options, rank, state.local_rank);
  make_current(state.device);
  state.options = options;
}

// The process group is there: what goes over it.
void take_connections(detail::MeshState& state) {
  state.names = make_call_names(state.process_group);
  state.group = make_torch_group(state.process_group, state.names);
  if (!goes_over_host(state.device))
    require_own_devices(everyones_device(*state.group, state.device));
  state.transport = make_same_host_transport(state.process_group);
  if (!state.transport) state.transport = make_pairwise_transport(state.process_group, state.names);
  if (!state.transport)
    state.transport = make_c10d_transport(state.process_group, state.reductions);
}

}  // namespace

detail::MeshState::~MeshState() {
  if (made) return;
  const auto leave = [](auto&& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    static_cast<void>(new Member(std::forward<decltype(member)>(member)));
  };
  leave(std::move(store));
  leave(std::move(process_group));
  leave(std::move(reductions));
  leave(std::move(names));
  leave(std::move(group));
  leave(std::move(checkpoint_group));
  leave(std::move(transport));
}

void detail::forget_dead_units(MeshState& state) {
  const auto dead =
      std::ranges::stable_partition(state.units, [](const auto& unit) { return !unit->is_dead(); });
  // Destroyed when the list is whole again.
  const std::vector<std::shared_ptr<MeshUnit>> dropped(dead.begin(), dead.end());
  state.units.erase(dead.begin(), dead.end());
}

Mesh::Mesh(const MeshOptions& options) : state_(make_state()) {
  begin(*state_, 0, 1, options);
  state_->group = solo_group();
  state_->transport = make_solo_transport();
}

Mesh::Mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
           const MeshOptions& options)
    : state_(make_state()) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(ErrorCode::invalid_argument,
                "rank " + std::to_string(rank) + " of " + std::to_string(size) + " ranks");
  }
  auto& state = *state_;
  begin(state, rank, size, options);
  survive_broken_pipes();
  state.process_group = communicate("connecting the ranks", [&] {
    state.store = meet(store, rank, size, options.deadline);
    state.reductions = make_reduction_group(state.store, rank, size, state.device, options);
    return make_process_group(state.store, rank, size, state.device, options);
  });
  take_connections(state);
}

Mesh::Mesh(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const MeshOptions& options)
    : state_(make_state()) {
  if (!group) throw Error(ErrorCode::invalid_argument, "a mesh of no process group");
  auto& state = *state_;
  begin(state, group->getRank(), group->getSize(), options);
  survive_broken_pipes();
  const auto store = group->getStore();
  if (!store) {
    throw Error(ErrorCode::invalid_argument,
                "the process group has no store, expected one made as ProcessGroup(store, rank, "
                "size): ranks meet there for connections of their own");
  }
  state.process_group = communicate("connecting the ranks", [&] {
    state.store = meet(store, state.rank, state.size, options.deadline);
    return with_messages(group, state.store, state.device, options);
  });
  take_connections(state);
}

Mesh Mesh::from_environment(const MeshOptions& options) {
  const auto launched = launched_rank();
  // torchrun's group of one is a group all the same.
  if (!launched || (launched->size == 1 && std::getenv("WORLD_SIZE") == nullptr))
    return Mesh(options);
  return Mesh(store_from_environment(*launched, options.deadline), launched->rank, launched->size,
              options);
}

HybridMesh Mesh::split(int shard_size) const {
  auto& state = *state_;
  if (state.size > 1) require_own_connections(state.made);
  if (shard_size < 1 || state.size % shard_size != 0) {
    throw Error(ErrorCode::invalid_argument, "shards over " + std::to_string(shard_size) +
                                                 " ranks, expected a factor of " +
                                                 std::to_string(state.size));
  }
  if (const auto known = state.splits.find(shard_size); known != state.splits.end())
    return {*this, Mesh(known->second.first), Mesh(known->second.second)};
  const auto part = [&](const char* what, int index, int rank, int size) {
    auto options = state.options;
    options.device = state.device;
    if (size == 1) return Mesh(options);
    const auto prefix =
        "tessera/split/" + std::to_string(shard_size) + "/" + what + "/" + std::to_string(index);
    return Mesh(c10::make_intrusive<c10d::PrefixStore>(prefix, state.store), rank, size, options);
  };
  const int place = state.rank % shard_size, replica = state.rank / shard_size;
  HybridMesh hybrid{*this, part("shard", replica, place, shard_size),
                    part("replicate", place, replica, state.size / shard_size)};
  state.splits.emplace(shard_size, std::pair(hybrid.shard.state_, hybrid.replicate.state_));
  return hybrid;
}

int Mesh::rank() const noexcept {
  return state_->rank;
}
int Mesh::size() const noexcept {
  return state_->size;
}
int Mesh::local_rank() const noexcept {
  return state_->local_rank;
}
torch::Device Mesh::device() const noexcept {
  return state_->device;
}
Group& Mesh::group() const {
  if (state_->size > 1) require_own_connections(state_->made);
  return *state_->group;
}
namespace {

std::unique_ptr<Group> made_checkpoint_group(detail::MeshState& state) {
  const auto place = "tessera/checkpoint/" + std::to_string(state.checkpoint_groups++);
  const auto deadline = state.options.deadline;
  return make_tree_group(
      state.rank, state.size,
      {.silence = state.options.silence, .longest_wait = state.options.longest_wait}, deadline,
      connect_by_gloo(c10::make_intrusive<c10d::PrefixStore>(place, state.store), state.rank,
                      state.size, deadline));
}

}  // namespace

Group& Mesh::checkpoint_group() const {
  auto& state = *state_;
  if (state.size == 1) return *state.group;
  require_own_connections(state.made);
  if (!state.checkpoint_group) state.checkpoint_group = made_checkpoint_group(state);
  return *state.checkpoint_group;
}

std::shared_ptr<Group> Mesh::writer_group() const {
  auto& state = *state_;
  if (state.size == 1) return solo_group();
  require_own_connections(state.made);
  return made_checkpoint_group(state);
}

const c10::intrusive_ptr<c10d::ProcessGroup>& Mesh::process_group() const noexcept {
  return state_->process_group;
}

void Mesh::all_reduce_sum(torch::Tensor& values) const {
  require_defined("all-reduce", values);
  if (!state_->process_group) return;
  require_own_connections(state_->made);
  std::vector<at::Tensor> tensors{plain(values)};
  communicate("all-reduce", [&] {
    require_same_call(state_->names.get(), "all-reduce by sum of " +
                                               std::to_string(values.numel()) + " " +
                                               c10::toString(values.scalar_type()));
    state_->process_group->allreduce(tensors)->wait();
  });
  if (!tensors.front().is_same(values)) values.copy_(tensors.front());
}

double Mesh::all_reduce_max(double value) const {
  if (!state_->process_group) return value;
  require_own_connections(state_->made);
  // Backends differ in what is larger, a number or none.
  const bool is_none = std::isnan(value);
  std::vector<at::Tensor> tensors{
      torch::tensor({is_none ? 0.0 : value, is_none ? 1.0 : 0.0}, torch::kFloat64)
          .to(state_->device)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  communicate("all-reduce", [&] {
    require_same_call(state_->names.get(), "all-reduce by maximum of a number");
    state_->process_group->allreduce(tensors, options)->wait();
  });
  const auto largest = tensors.front().cpu();
  return largest[1].item<double>() > 0 ? std::nan("") : largest[0].item<double>();
}

double Mesh::all_reduce_sum(double value) const {
  auto tensor = torch::tensor({value}, torch::kFloat64).to(state_->device);
  all_reduce_sum(tensor);
  return tensor.item<double>();
}

}  // namespace tessera
