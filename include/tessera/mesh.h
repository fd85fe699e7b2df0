// Mesh: the ranks that train together, their device, and how they talk.
//
// A Mesh is a small handle; copies share the process group, whose connections close when the last
// handle and the last module that was sharded over it are gone. Each rank uses one thread: threads
// do not share a Mesh. Nor do children of fork(), where it throws `invalid_argument`. A mesh of
// several ranks makes this process ignore SIGPIPE, unless the program handles it.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/comm.h"

namespace [[gnu::visibility("default")]] tessera {

struct MeshOptions {
  // The device where parameters live and compute runs. Unset: CUDA device LOCAL_RANK if libtorch
  // has CUDA and the machine has a device, else the CPU.
  std::optional<torch::Device> device;
  // How long a collective may take before its peers count as lost, and a TCPStore to answer a call.
  std::chrono::milliseconds deadline = std::chrono::minutes(5);
  int gloo_threads = 2;  // that run its collectives; one is markedly slower than two
  // Collectives of a mesh on the CPU go through shared memory if all its ranks are on one host and
  // can map it; the ranks find that out together. False on any rank, or TESSERA_SAME_HOST=0 in its
  // environment, keeps Gloo for all ranks. Gloo always does what shared memory cannot (point to
  // point, all-to-all). With shared memory a dead peer is noticed within a fraction of a second,
  // and collectives make progress only inside this rank's calls.
  bool same_host = true;
  // A rank of checkpoint_group() that gives no sign of life for `silence` while others wait for it
  // counts as lost. One that is alive is waited for until `longest_wait`.
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  std::chrono::milliseconds longest_wait = std::chrono::hours(1);
};

namespace detail {
struct MeshState;
struct MeshAccess;
}  // namespace detail

struct HybridMesh;

class Mesh {
 public:
  // One rank alone, without a store or sockets.
  explicit Mesh(const MeshOptions& options = {});
  // Rank `rank` of `size` ranks, which find each other through `store`. Collective.
  Mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
       const MeshOptions& options = {});
  // The ranks of a program's own group, made as ProcessGroup(store, rank, size) with a backend for
  // the mesh's device. It carries the collectives, with its own deadline and no shared memory; the
  // program may use it too, in the same order on all ranks. Messages that it has no CPU backend for
  // go through a Gloo group made in its store, where checkpoint_group() and split() meet as well.
  // Throws `invalid_argument` without a store or a backend for the device. Collective.
  explicit Mesh(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                const MeshOptions& options = {});

  // Reads rank and size as the program that started this process gives them: torchrun (RANK,
  // WORLD_SIZE, LOCAL_RANK), Open MPI's mpirun (OMPI_COMM_WORLD_RANK, ...), launchers that speak
  // PMI (PMI_RANK, PMI_SIZE), or srun (SLURM_PROCID, ... of a job step). If none of them says
  // anything, the mesh is one rank alone. Several ranks meet at MASTER_ADDR and MASTER_PORT, which
  // only torchrun sets by itself. May be called again. Throws `invalid_argument` naming a wrong or
  // missing variable, `timeout` if peers or store stay away, `io` for a taken port. Collective.
  [[nodiscard]] static Mesh from_environment(const MeshOptions& options = {});

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  [[nodiscard]] int local_rank() const noexcept;  // on this host; 0 if the environment does not say
  [[nodiscard]] torch::Device device() const noexcept;

  // The same ranks for small messages about what the connections of training carry, states too.
  [[nodiscard]] Group& group() const;
  // The same ranks over connections of their own, along a tree: a rank has at most 33, each of
  // which carries signs of life from threads of its own. Checkpoint save and load take this. They
  // wait for slow ranks, and they name a rank that is stopped or killed, on all others. Two threads
  // that call it at once get `conflict`. One thread may use it while another trains. Made when
  // first asked for: collective, `timeout` or `peer_failed` if a rank does not come.
  [[nodiscard]] Group& checkpoint_group() const;
  // Another one, for a CheckpointWriter alone; it may outlive the mesh. Each call is collective.
  [[nodiscard]] std::shared_ptr<Group> writer_group() const;
  // Null for one rank alone. Not for children of fork(): a call of Gloo's waits there for ever.
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const noexcept;

  // Adds up `values` over all ranks, in place. Every rank gives the same shape and dtype. Throws
  // `timeout` or `peer_failed` if the peers do not answer. Collective.
  void all_reduce_sum(torch::Tensor& values) const;
  // The same for one number.
  [[nodiscard]] double all_reduce_sum(double value) const;
  // The largest of the ranks' numbers; NaN when one of them is.
  [[nodiscard]] double all_reduce_max(double value) const;

  // Arranges the ranks in two dimensions. Rank r shards with the `shard_size` ranks that have the
  // same r / shard_size, and replicates with those that have the same r % shard_size. Under
  // torchrun the ranks of a host have neighbouring numbers, so shards travel within hosts. Throws
  // `invalid_argument` if `shard_size` does not divide the number of ranks. A second call with the
  // same size gives the same meshes. Collective.
  [[nodiscard]] HybridMesh split(int shard_size) const;

  [[nodiscard]] bool operator==(const Mesh&) const noexcept = default;

 private:
  friend struct detail::MeshAccess;
  explicit Mesh(std::shared_ptr<detail::MeshState> state) noexcept : state_(std::move(state)) {}

  std::shared_ptr<detail::MeshState> state_;
};

// Made by Mesh::split. `all` owns the other two.
struct HybridMesh {
  Mesh all;
  Mesh shard;      // the ranks that together hold one copy of the parameters
  Mesh replicate;  // the ranks that hold the same part of a copy as this rank
};

}  // namespace tessera
