// Mesh: the ranks that train together, their device, and how they talk.
//
// A Mesh is a small handle; copies share one state. It owns the process group and the units that
// fully_shard makes on it, so it has to outlive training with them; when the last copy goes, the
// connections are closed. One thread a rank: a Mesh is not shared between threads. A mesh of
// several ranks ignores SIGPIPE in this process, unless the program handles it.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/comm.h"

namespace tessera {

struct MeshOptions {
  // Where parameters live and compute runs; unset: CUDA device LOCAL_RANK where libtorch has CUDA
  // and the machine a device, else CPU.
  std::optional<torch::Device> device;
  // How long a collective may take before the peers count as lost.
  std::chrono::milliseconds deadline = std::chrono::minutes(5);
  // Threads that Gloo runs collectives on; one is markedly slower than two.
  int gloo_threads = 2;
  // Collectives of a mesh on the CPU go through shared memory when all its ranks are on one host
  // and can map it, which they find out together; false on any rank, or TESSERA_SAME_HOST=0 in its
  // environment, keeps Gloo for all. Gloo does in any case what shared memory does not (point to
  // point, all-to-all). Through shared memory a dead peer is noticed within a fraction of a second,
  // and collectives make progress inside this rank's calls only.
  bool same_host = true;
};

namespace detail {
struct MeshState;
struct MeshAccess;
}  // namespace detail

struct HybridMesh;

class Mesh {
 public:
  // One rank alone; no store, no sockets.
  explicit Mesh(const MeshOptions& options = {});
  // Rank `rank` of `size`, which find each other through `store`. Collective.
  Mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
       const MeshOptions& options = {});

  // What the program that started this process says: torchrun (RANK, WORLD_SIZE, LOCAL_RANK), Open
  // MPI's mpirun (OMPI_COMM_WORLD_RANK, ...), launchers that speak PMI (PMI_RANK, PMI_SIZE), srun
  // (SLURM_PROCID, ... of a job step); one rank alone when none of them says anything. Several
  // ranks meet at MASTER_ADDR and MASTER_PORT, which only torchrun sets by itself. Throws
  // `invalid_argument` naming a variable that is missing or wrong, `timeout` when the peers do not
  // come, `io` when the port is taken. Collective.
  [[nodiscard]] static Mesh from_environment(const MeshOptions& options = {});

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  [[nodiscard]] int local_rank()
      const noexcept;  // on this host; 0 when the environment does not say
  [[nodiscard]] torch::Device device() const noexcept;

  // The same ranks for small messages (plans, errors): what checkpoint save and load take.
  [[nodiscard]] Group& group() const;
  // Null for one rank alone.
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const noexcept;

  // Adds up `values` over all ranks, in place. Collective; every rank gives the same shape and
  // dtype. Throws `timeout` or `peer_failed` when the peers do not answer.
  void all_reduce_sum(torch::Tensor& values) const;
  // The same for one number.
  [[nodiscard]] double all_reduce_sum(double value) const;
  // The largest of the ranks' numbers.
  [[nodiscard]] double all_reduce_max(double value) const;

  // The ranks in two dimensions: rank r shards with the `shard_size` ranks that have the same
  // r / shard_size and replicates with those that have the same r % shard_size. Ranks of one host
  // have neighbouring numbers under torchrun, so shards travel within hosts. Throws
  // `invalid_argument` when `shard_size` does not divide the number of ranks. Asked again for the
  // same size it gives the same meshes. Collective.
  [[nodiscard]] HybridMesh split(int shard_size) const;

  [[nodiscard]] bool operator==(const Mesh&) const noexcept = default;

 private:
  friend struct detail::MeshAccess;
  explicit Mesh(std::shared_ptr<detail::MeshState> state) noexcept : state_(std::move(state)) {}

  std::shared_ptr<detail::MeshState> state_;
};

// Made by Mesh::split. `all` owns the other two: it has to outlive training with them.
struct HybridMesh {
  Mesh all;
  Mesh shard;      // the ranks that hold one copy of the parameters together
  Mesh replicate;  // the ranks that hold the same part of it as this one
};

}  // namespace tessera
