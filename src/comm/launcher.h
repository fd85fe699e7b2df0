// Which rank of how many this process is, as the program that started it says in the environment.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct LaunchedRank {
  int rank = 0;
  int size = 1;
  std::string launcher;  // as a user calls it: "torchrun"
};

// An environment variable's text; null when it is not set.
using Environment = std::function<const char*(const char* name)>;

// The environment of this process.
[[nodiscard]] const char* environment_of_process(const char* name);

// What torchrun (RANK, WORLD_SIZE), Open MPI's mpirun (OMPI_COMM_WORLD_*), launchers
// that speak PMI such as MPICH's (PMI_*) or srun (SLURM_*, inside of a job step) have set, the
// first of these that has set anything; nothing when none has: then this process is alone. Throws
// `invalid_argument` naming the variable that is missing or wrong, also when one says that there
// are more processes but none says how many.
[[nodiscard]] std::optional<LaunchedRank> launched_rank(
    const Environment& environment = environment_of_process);

// The rank among those of its host, as LOCAL_RANK or the launcher's own variable says; else 0.
// Throws `invalid_argument` when that is no number.
[[nodiscard]] int local_rank_of(const Environment& environment = environment_of_process);

// The rank among those that share a disk: FS_LOCAL_RANK, else that of its host. With a disk that
// all hosts share, a launcher sets FS_LOCAL_RANK to the rank in the world, so that one rank alone
// has 0 (checkpoint-rows O-02).
[[nodiscard]] int fs_local_rank_of(const Environment& environment = environment_of_process);

// How many threads read and write a checkpoint unless its options say so: OLMO_NUM_THREADS, else
// four more than there are cores, 32 at most (checkpoint-rows O-05). Throws `invalid_argument` for
// a variable that is no number from 1 to 1024.
[[nodiscard]] int default_thread_count(const Environment& environment = environment_of_process);

// The number in variable `name`; throws `invalid_argument` unless it is one in [low, high].
// `launcher`: who would have set it.
[[nodiscard]] int number_of(const Environment& environment, const char* name,
                            const std::string& launcher, int low, int high);

}  // namespace tessera
