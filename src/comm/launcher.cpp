#include "comm/launcher.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "base/parallel.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kMost = 1 << 20;

// The variables of one launcher. It is the one when `rank` or `size` is set.
struct Names {
  const char* launcher;
  const char* rank;
  const char* size;
};

// Who is further down may have started who is further up: mpirun runs in job steps of Slurm.
constexpr std::array kLaunchers = {
    Names{"torchrun", "RANK", "WORLD_SIZE"},
    Names{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    Names{"mpiexec", "PMI_RANK", "PMI_SIZE"},
};
// A job's script sees the numbers of the job, and is one process all the same: only what srun has
// started is in a step.
constexpr std::array kSlurmSteps = {"SLURM_STEP_ID", "SLURM_STEPID"};
constexpr std::array kSlurmSizes = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"};
constexpr std::array kLocalRanks = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                    "SLURM_LOCALID"};

// The first of `names` that is set; else the first.
template <std::size_t Size>
const char* first_set(const Environment& environment, const std::array<const char*, Size>& names) {
  for (const char* name : names) {
    if (environment(name) != nullptr) return name;
  }
  return names.front();
}

LaunchedRank read(const Environment& environment, const Names& names) {
  LaunchedRank found{.launcher = names.launcher};
  found.size = number_of(environment, names.size, found.launcher, 1, kMost);
  found.rank = number_of(environment, names.rank, found.launcher, 0, found.size - 1);
  return found;
}

}  // namespace

const char* environment_of_process(const char* name) {
  return std::getenv(name);
}

int number_of(const Environment& environment, const char* name, const std::string& launcher,
              int low, int high) {
  const char* text = environment(name);
  if (text == nullptr) {
    throw Error(ErrorCode::invalid_argument, std::string("environment variable ") + name +
                                                 " is not set, but others of " + launcher +
                                                 "'s are");
  }
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  if (error != std::errc() || end != view.data() + view.size() || value < low || value > high) {
    throw Error(ErrorCode::invalid_argument, std::string(name) + "=" + text +
                                                 ", expected a number from " + std::to_string(low) +
                                                 " to " + std::to_string(high));
  }
  return value;
}

std::optional<LaunchedRank> launched_rank(const Environment& environment) {
  const auto is_set = [&](const char* name) { return environment(name) != nullptr; };
  for (const auto& names : kLaunchers) {
    if (is_set(names.rank) || is_set(names.size)) return read(environment, names);
  }
  if (is_set("SLURM_PROCID") && is_set(first_set(environment, kSlurmSteps))) {
    return read(environment, {"srun", "SLURM_PROCID", first_set(environment, kSlurmSizes)});
  }
  if (is_set("PMIX_RANK")) {
    throw Error(ErrorCode::invalid_argument,
                std::string("PMIX_RANK=") + environment("PMIX_RANK") +
                    " says that this process is one of several, and no variable says of how many: "
                    "set RANK and WORLD_SIZE, or unset PMIX_RANK for one rank alone");
  }
  return std::nullopt;
}

int local_rank_of(const Environment& environment) {
  const char* name = first_set(environment, kLocalRanks);
  return environment(name) == nullptr ? 0 : number_of(environment, name, "", 0, kMost);
}

int fs_local_rank_of(const Environment& environment) {
  constexpr const char* kName = "FS_LOCAL_RANK";
  if (environment(kName) == nullptr) return local_rank_of(environment);
  return number_of(environment, kName, "", 0, kMost);
}

int default_thread_count(const Environment& environment) {
  constexpr const char* kName = "OLMO_NUM_THREADS";
  constexpr unsigned kMostByDefault = 32, kBesideCores = 4;
  if (environment(kName) != nullptr) return number_of(environment, kName, "", 1, kMostThreads);
  const unsigned cores = std::thread::hardware_concurrency();  // 0: not known
  return static_cast<int>(std::min(kMostByDefault, cores + kBesideCores));
}

}  // namespace tessera
