// The state that the copies of a Mesh share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "base/process.h"
#include "tessera/mesh.h"
#include "torch/call_names.h"
#include "torch/transport.h"

namespace tessera::detail {

// A unit of fully_shard, which lives on a mesh until its module dies.
class MeshUnit {
 public:
  virtual ~MeshUnit() = default;
  [[nodiscard]] virtual bool is_dead() const = 0;
};

struct MeshState : std::enable_shared_from_this<MeshState> {
  MeshState() = default;
  // In a child of fork() it touches nothing: peers, memory and threads are the parent's.
  ~MeshState();
  MeshState(const MeshState&) = delete;
  MeshState& operator=(const MeshState&) = delete;

  MadeHere made;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  torch::Device device = torch::kCPU;
  MeshOptions options;                    // for the meshes that are split off
  c10::intrusive_ptr<c10d::Store> store;  // null: one rank alone
  // Destroyed from the bottom up: what was split off, then transport, then the connections.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;  // null: one rank alone
  c10::intrusive_ptr<c10d::ProcessGroup> reductions;     // null: process_group carries them, too
  std::shared_ptr<CallNames> names;  // null: what is called is compared elsewhere, or not at all
  std::unique_ptr<Group> group;
  std::unique_ptr<Group> checkpoint_group;  // null: nobody has asked for it
  int checkpoint_groups = 0;                // attempts to make it, the same on all ranks
  std::unique_ptr<Transport> transport;
  std::map<int, std::pair<std::shared_ptr<MeshState>, std::shared_ptr<MeshState>>>
      splits;  // by shard size: shard, replicate
  // Owned here. A unit keeps its meshes in turn, until forget_dead_units finds it dead.
  std::vector<std::shared_ptr<MeshUnit>> units;
  std::uint32_t units_made = 0;  // ever, the same on all ranks
};

// Lets go of units whose modules have died.
void forget_dead_units(MeshState& state);

// The parts of a Mesh that are the runtime's alone.
struct MeshAccess {
  static const std::shared_ptr<MeshState>& state(const Mesh& mesh) noexcept { return mesh.state_; }
  static Mesh mesh(std::shared_ptr<MeshState> state) noexcept { return Mesh(std::move(state)); }
};
inline const std::shared_ptr<MeshState>& state_of(const Mesh& mesh) noexcept {
  return MeshAccess::state(mesh);
}
inline Mesh mesh_of(std::shared_ptr<MeshState> state) noexcept {
  return MeshAccess::mesh(std::move(state));
}

}  // namespace tessera::detail

namespace tessera {

// A mesh among what a forward keeps for its backward.

struct SavedMesh : torch::CustomClassHolder {
  explicit SavedMesh(Mesh given) : mesh(std::move(given)) {}
  Mesh mesh;
};

inline void save_mesh(torch::autograd::AutogradContext& context, const Mesh& mesh) {
  context.saved_data["mesh"] = c10::IValue::make_capsule(c10::make_intrusive<SavedMesh>(mesh));
}

inline Mesh saved_mesh(torch::autograd::AutogradContext& context) {
  const auto saved = context.saved_data["mesh"].toCapsule();
  return static_cast<const SavedMesh&>(*saved).mesh;
}

}  // namespace tessera
