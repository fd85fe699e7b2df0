// Models that no rank could hold whole, built in the memory that a rank has.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <malloc.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tessera/deferred_init.h"
#include "tessera/fsdp.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

// A model of 128 MiB where a process may have 110 MiB more than it begins with.

struct LargeImpl : nn::Module {
  std::vector<nn::Linear> layers;
  explicit LargeImpl(int count = 32, int width = 1024) {
    for (int i = 0; i < count; ++i) {
      layers.push_back(register_module(std::to_string(i),
                                       nn::Linear(nn::LinearOptions(width, width).bias(false))));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = call_module(layer, x);
    return x;
  }
};
TESSERA_MODULE(Large);

constexpr int kDone = 0, kFailed = 1, kNoMemory = 2;
// Shards of 128 MiB, a unit of 4, and 28 that wait to go back or come with first uses.
constexpr std::uint64_t kPlainMebibytes = 160;

void limit_memory() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t pages = 0;
  file >> pages;
  const auto bytes = pages * 4096 + (110 << 20);
  const rlimit limit{bytes, bytes};
  if (!file || setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(kFailed);
}

std::uint64_t peak_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    std::uint64_t kibibytes = 0;
    if (word == "VmHWM:" && file >> kibibytes) return kibibytes << 10;
  }
  return 0;
}

Mesh mesh_of_two(int rank, const std::string& directory) {
  return Mesh(c10::make_intrusive<c10d::FileStore>(directory + "/store", 2), rank, 2,
              {.device = torch::kCPU, .same_host = false});
}

// Code and tables of libtorch come into memory when they are used first.
void load_kernels(const Mesh& mesh) {
  auto small = deferred_init([] { return Large(1, 64); });
  fully_shard(small, mesh);
}

// What a program gets that knows nothing of malloc's settings.
int build_without_settings(int rank, const std::string& directory) {
  const auto mesh = mesh_of_two(rank, directory);
  load_kernels(mesh);
  const auto before = peak_bytes();
  auto wide = deferred_init([] { return Large(64); });
  for (auto& layer : wide->layers) fully_shard(layer, mesh);
  fully_shard(wide, mesh);
  const auto taken = (peak_bytes() - before) >> 20;
  if (taken <= kPlainMebibytes) return kDone;
  std::fprintf(stderr, "rank %d took %d MiB\n", rank, static_cast<int>(taken));
  return kFailed;
}

// `role`: "eager", or the number of one of two ranks that share the files in `directory`; behind
// "plain" that of build_without_settings.
int build_in_little_memory(const std::string& role, const std::string& directory) {
  if (role.starts_with("plain")) return build_without_settings(role.back() - '0', directory);
  // Address space is to be what tensors take: no arena for each thread, and what is freed goes
  // back.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  at::set_num_threads(1);
  torch::manual_seed(1);
  if (role == "eager") {
    limit_memory();
    const Large wide;
    return kDone;
  }
  const auto mesh = mesh_of_two(std::stoi(role), directory);
  limit_memory();
  auto wide = deferred_init([] { return Large(); });
  for (auto& layer : wide->layers) fully_shard(layer, mesh);
  fully_shard(wide, mesh);
  const torch::NoGradGuard no_grad;
  const auto result = wide(torch::ones({1, 1024}));
  torch::manual_seed(1);
  auto first = nn::Linear(nn::LinearOptions(1024, 1024).bias(false));
  const auto mine = first->weight.narrow(0, 512 * mesh.rank(), 512);
  return torch::equal(sharded_parameters(wide)[0].local, mine) &&
                 result.isfinite().all().item<bool>()
             ? kDone
             : kFailed;
}

// This program once more, for this test alone.
pid_t start(const std::string& role, const std::string& directory) {
  setenv("TESSERA_TEST_ROLE", role.c_str(), 1);
  setenv("TESSERA_TEST_DIRECTORY", directory.c_str(), 1);
  std::string program = "/proc/self/exe", filter = "--gtest_filter=DeferredMemory.*";
  std::array<char*, 3> arguments{program.data(), filter.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments.data(), environ), 0);
  unsetenv("TESSERA_TEST_ROLE");
  return child;
}

int exit_code(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(DeferredMemory, BuildsAModelThatIsLargerThanARanksMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers take any address space";
#endif
  if (const auto* role = std::getenv("TESSERA_TEST_ROLE")) {
    int code = kFailed;
    try {
      code = build_in_little_memory(role, std::getenv("TESSERA_TEST_DIRECTORY"));
    } catch (const std::exception& e) {
      const std::string what = e.what();
      if (what.find("can't allocate memory") != std::string::npos) code = kNoMemory;
      std::fprintf(stderr, "%s: %s\n", role, what.substr(0, 300).c_str());
    }
    std::_Exit(code);
  }
  std::string directory = ::testing::TempDir() + "tessera_deferred_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  EXPECT_EQ(exit_code(start("eager", directory)), kNoMemory);
  const auto first = start("0", directory), second = start("1", directory);
  EXPECT_EQ(exit_code(first), kDone);
  EXPECT_EQ(exit_code(second), kDone);
  std::filesystem::remove_all(directory);
}

// A model of 256 MiB: its half, one unit of 4 MiB, and what is on its way back to the system.
TEST(DeferredMemory, ARankTakesItsShardsAndOneUnitWithoutAnySetting) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep freed memory";
#endif
  std::string directory = ::testing::TempDir() + "tessera_deferred_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const auto first = start("plain0", directory), second = start("plain1", directory);
  EXPECT_EQ(exit_code(first), kDone);
  EXPECT_EQ(exit_code(second), kDone);
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace tessera
