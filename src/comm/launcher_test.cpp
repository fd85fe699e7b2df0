#include "comm/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <thread>

#include "conformance/errors.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Variables = std::map<std::string, std::string>;

Environment environment_of(const Variables& variables) {
  return [&](const char* name) -> const char* {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  };
}

// "rank of size, local rank, launcher"
std::string place(const Variables& variables) {
  const auto environment = environment_of(variables);
  const auto at = launched_rank(environment);
  if (!at) return "alone";
  return std::to_string(at->rank) + " of " + std::to_string(at->size) + ", " +
         std::to_string(local_rank_of(environment)) + ", " + at->launcher;
}

std::string refusal(const Variables& variables) {
  try {
    static_cast<void>(launched_rank(environment_of(variables)));
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    return e.message();
  }
  return "none";
}

TEST(Launcher, TakesWhatEachLauncherSets) {
  EXPECT_EQ(place({}), "alone");
  EXPECT_EQ(place({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}}),
            "5 of 8, 1, torchrun");
  EXPECT_EQ(place({{"OMPI_COMM_WORLD_RANK", "3"},
                   {"OMPI_COMM_WORLD_SIZE", "4"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"PMIX_RANK", "3"}}),
            "3 of 4, 1, mpirun");
  EXPECT_EQ(place({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}}),
            "1 of 2, 1, mpiexec");
  EXPECT_EQ(place({{"SLURM_PROCID", "6"},
                   {"SLURM_NTASKS", "8"},
                   {"SLURM_STEP_NUM_TASKS", "7"},
                   {"SLURM_STEP_ID", "0"},
                   {"SLURM_LOCALID", "2"}}),
            "6 of 7, 2, srun");
  EXPECT_EQ(place({{"SLURM_PROCID", "0"}, {"SLURM_NPROCS", "2"}, {"SLURM_STEPID", "1"}}),
            "0 of 2, 0, srun");
}

// torchrun as a task of srun, mpirun in a job of Slurm: the inner one knows its own ranks.
TEST(Launcher, TheInnermostLauncherCounts) {
  const Variables slurm{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}};
  auto torchrun = slurm;
  torchrun.insert({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "3"}});
  EXPECT_EQ(place(torchrun), "3 of 8, 3, torchrun");
  auto mpirun = slurm;
  mpirun.insert({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}});
  EXPECT_EQ(place(mpirun), "0 of 4, 0, mpirun");
}

// sbatch runs the script once, whatever number of tasks the job has.
TEST(Launcher, AJobScriptOfSlurmIsOneProcess) {
  EXPECT_EQ(place({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "12"}}), "alone");
}

TEST(Launcher, NamesWhatIsMissingOrWrong) {
  EXPECT_THAT(refusal({{"WORLD_SIZE", "2"}}), ::testing::HasSubstr("RANK is not set"));
  EXPECT_THAT(refusal({{"OMPI_COMM_WORLD_RANK", "0"}}),
              ::testing::AllOf(::testing::HasSubstr("OMPI_COMM_WORLD_SIZE is not set"),
                               ::testing::HasSubstr("mpirun")));
  EXPECT_THAT(refusal({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}), ::testing::HasSubstr("PMI_RANK=2"));
  EXPECT_THAT(refusal({{"SLURM_PROCID", "1"}, {"SLURM_STEP_ID", "0"}}),
              ::testing::HasSubstr("SLURM_STEP_NUM_TASKS is not set"));
  EXPECT_THAT(refusal({{"PMIX_RANK", "0"}}), ::testing::HasSubstr("PMIX_RANK=0"));
  const Variables wrong{{"SLURM_LOCALID", "x"}};
  EXPECT_THROW(static_cast<void>(local_rank_of(environment_of(wrong))), Error);
}

TEST(Launcher, TheRankOnADiskHasAVariableOfItsOwn_O02) {
  const auto rank = [](const Variables& variables) {
    return fs_local_rank_of(environment_of(variables));
  };
  EXPECT_EQ(rank({}), 0);
  EXPECT_EQ(rank({{"LOCAL_RANK", "3"}}), 3);
  EXPECT_EQ(rank({{"SLURM_LOCALID", "2"}}), 2);
  EXPECT_EQ(rank({{"FS_LOCAL_RANK", "11"}, {"LOCAL_RANK", "3"}}), 11);
  EXPECT_THROW(static_cast<void>(rank({{"FS_LOCAL_RANK", "-1"}})), Error);
}

TEST(Launcher, TheNumberOfThreadsMayBeSet_O05) {
  const auto threads = [](const Variables& variables) {
    return default_thread_count(environment_of(variables));
  };
  EXPECT_EQ(threads({}), std::min(32, static_cast<int>(std::thread::hardware_concurrency()) + 4));
  EXPECT_EQ(threads({{"OLMO_NUM_THREADS", "7"}}), 7);
  for (const char* wrong : {"0", "-2", "many", "", "1025"}) {
    const Variables variables{{"OLMO_NUM_THREADS", wrong}};
    const Error error = error_of([&] { static_cast<void>(threads(variables)); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << wrong;
    EXPECT_THAT(error.message(), ::testing::HasSubstr("OLMO_NUM_THREADS="));
  }
}

}  // namespace
}  // namespace tessera
