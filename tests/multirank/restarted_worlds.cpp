// A training of W ranks dies, and V ranks load what its writer processes keep in memory, beside
// what they had written to the disk: every tensor of model and optimizer has to be the same, bit
// for bit.
//   restarted_worlds COMMAND DIRECTORY [TRAININGS SEED]
// COMMAND is `tessera`. Each way to shard a model is trained on W = 1 to 4 ranks for two steps,
// saved and killed, and then loaded on V = 1 to 4. With TRAININGS so many pairs of a way and a W
// are drawn, each with two of the V. Prints a line for each that goes wrong and a summary; exits
// with 1 when one did.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forked_ranks.h"
#include "optim_state/testing.h"
#include "storage/arena/arenas.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/training_writer.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using testing::Clock;
using testing::Net;
using testing::Way;

constexpr int kMostRanks = 4;
constexpr int kTrainedSteps = 2;
constexpr std::chrono::seconds kLimit{60};
// fully_shard by rows and end to end, FSDP1 with flat parameters and original ones, DDP.
constexpr Way kWays[] = {Way::rows, Way::aligned, Way::flat, Way::original, Way::replicated};

struct Board {
  std::atomic<int> saved = 0;     // ranks that have
  std::atomic<int> compared = 0;  // tensors
  std::atomic<bool> is_wrong = false;
  char wrong[2000] = "";
};
Board* board = nullptr;

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::mismatch, what);
}

// A model and its optimizer, before they are trained or loaded.
struct Training {
  Net net;
  testing::Optimizer optimizer;

  Training(Net made, Way way, const Mesh& mesh) : net(std::move(made)) {
    testing::shard(net, way, mesh);
    optimizer = testing::make_optimizer(net);
  }
  [[nodiscard]] TrainingState state() { return {net, *optimizer}; }
};

void train(Way way, const Mesh& mesh, const std::string& command, const std::string& place) {
  Training training(testing::make_net({}), way, mesh);
  testing::train(training.net, *training.optimizer, 0, kTrainedSteps);
  WriterOptions options;
  options.process = true;
  options.program = command;
  options.idle = false;
  options.keep = std::chrono::minutes(5);
  CheckpointWriter writer(mesh.writer_group(), options);
  TrainingState state = training.state();
  state.values.set_item("step", kTrainedSteps);
  save(writer, state, place).result();
  ++board->saved;
  while (true) ::pause();
}

// What this rank has of the training there.
struct Loaded {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  std::vector<double> options;  // of the optimizer

  Loaded(Way way, const Mesh& mesh, const std::string& place) {
    Training training(testing::half_net(), way, mesh);
    TrainingState state = training.state();
    state.values.set_item("step", 0);
    load(state, place);
    require(state.values.at("step").as_int() == kTrainedSteps, "another step is in " + place);
    const auto parameters = sharded_parameters(training.net);
    const auto& states = training.optimizer->state();
    for (const auto& parameter : parameters) {
      tensors.emplace_back(parameter.name(), parameter.local.detach().clone());
      const auto found = states.find(parameter.local.unsafeGetTensorImpl());
      if (found == states.end()) continue;  // of one that has nothing here
      const auto& adam = static_cast<const torch::optim::AdamParamState&>(*found->second);
      require(adam.step() == kTrainedSteps || parameter.local.numel() == 0,
              "another step of " + parameter.name());
      tensors.emplace_back(parameter.name() + " step", torch::tensor(adam.step()));
      tensors.emplace_back(parameter.name() + " exp_avg", adam.exp_avg());
      tensors.emplace_back(parameter.name() + " exp_avg_sq", adam.exp_avg_sq());
      tensors.emplace_back(parameter.name() + " max_exp_avg_sq", adam.max_exp_avg_sq());
    }
    for (const auto& buffer : training.net->named_buffers())
      tensors.emplace_back(buffer.key(), buffer.value());
    for (const auto& group : training.optimizer->param_groups())
      options.push_back(static_cast<const torch::optim::AdamOptions&>(group.options()).lr());
  }
};

bool have_same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

void compare(Way way, const Mesh& mesh, const std::string& place) {
  const Loaded memory(way, mesh, "arena://" + place), disk(way, mesh, place);
  require(memory.options == disk.options, "the optimizers' options differ");
  require(memory.tensors.size() == disk.tensors.size(), "they have other tensors");
  for (std::size_t i = 0; i < disk.tensors.size(); ++i) {
    const auto& [name, tensor] = memory.tensors[i];
    require(name == disk.tensors[i].first && have_same_bits(tensor, disk.tensors[i].second),
            name + " differs");
    board->compared += tensor.numel() > 0 ? 1 : 0;
  }
}

// `world` processes that are ranks of one mesh.
std::vector<testing::Child> fork_world(int world, const std::function<void(const Mesh&)>& body) {
  const int port = testing::free_port();
  return testing::fork_ranks(world, [&](int rank) {
    try {
      testing::set_environment(rank, world, port);
      torch::set_num_threads(1);
      const auto mesh = Mesh::from_environment({.device = torch::kCPU});
      body(mesh);
      return 0;
    } catch (const std::exception& error) {
      if (!board->is_wrong.exchange(true))
        std::strncpy(board->wrong, error.what(), sizeof board->wrong - 1);
      return 1;
    }
  });
}

std::string wrong_of(const std::string& ended) {
  return board->is_wrong ? " " + std::string(board->wrong) + ";" + ended : ended;
}

class Table {
 public:
  Table(std::string command, std::string directory)
      : command_(std::move(command)), directory_(std::move(directory)) {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
    ::setenv("TESSERA_ARENA_DIR", (directory_ + "/arenas").c_str(), 1);
  }

  void run(Way way, int before, const std::vector<int>& worlds) {
    const std::string place = directory_ + "/step2";
    const std::string what = name_of(way) + " of " + std::to_string(before) + " ranks";
    board = new (board) Board;
    note(what, train_and_die(way, before, place));
    for (const int after : worlds) {
      if (board->is_wrong) break;
      auto ranks = fork_world(after, [&](const Mesh& mesh) { compare(way, mesh, place); });
      testing::wait_for(ranks, {.end = Clock::now() + kLimit});
      const std::string ended =
          testing::end_all(ranks, [](int, int status) { return status == 0; });
      note(what + " into " + std::to_string(after), wrong_of(ended));
      ++loads_;
    }
    compared_ += board->compared;
    forget(kept_parts());
    std::filesystem::remove_all(place);
  }

  // The number of what went wrong.
  int finish() const {
    std::printf("%d loads from memory, %ld tensors compared with the disk's, %d wrong\n", loads_,
                compared_, wrong_);
    const auto end = Clock::now() + kLimit;
    while (!kept_parts().empty() && Clock::now() < end)
      std::this_thread::sleep_for(milliseconds(5));
    std::filesystem::remove_all(directory_);
    return wrong_;
  }

 private:
  std::string train_and_die(Way way, int world, const std::string& place) {
    auto ranks = fork_world(world, [&](const Mesh& mesh) { train(way, mesh, command_, place); });
    const auto end = Clock::now() + kLimit;
    while (board->saved < world && !board->is_wrong && Clock::now() < end)
      std::this_thread::sleep_for(milliseconds(2));
    for (const auto& rank : ranks) ::kill(rank.process, SIGKILL);
    testing::wait_for(ranks, {.end = Clock::now() + kLimit});
    std::string ended = testing::end_all(
        ranks, [](int, int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; });
    if (board->saved < world) ended += " it was not saved;";
    return wrong_of(ended);
  }

  void note(const std::string& what, const std::string& wrong) {
    if (wrong.empty()) return;
    ++wrong_;
    board->is_wrong = true;
    std::printf("%s:%s\n", what.c_str(), wrong.c_str());
    std::fflush(stdout);
  }

  const std::string command_, directory_;
  int loads_ = 0, wrong_ = 0;
  long compared_ = 0;
};

int run(int argc, char** argv) {
  board = testing::shared_by_processes<Board>();
  Table table(argv[1], argv[2]);
  std::vector<std::pair<Way, int>> trainings;
  for (const Way way : kWays)
    for (int world = 1; world <= kMostRanks; ++world) trainings.emplace_back(way, world);
  std::vector<int> worlds{1, 2, 3, 4};
  std::mt19937 random(argc == 5 ? static_cast<unsigned>(std::atoi(argv[4])) : 0);
  if (argc == 5) {
    std::shuffle(trainings.begin(), trainings.end(), random);
    trainings.resize(std::min<std::size_t>(trainings.size(), std::strtoul(argv[3], nullptr, 10)));
  }
  for (const auto& [way, before] : trainings) {
    if (argc == 5) {
      std::shuffle(worlds.begin(), worlds.end(), random);
      table.run(way, before, {worlds[0], worlds[1]});
    } else {
      table.run(way, before, worlds);
    }
  }
  return table.finish() > 0 ? 1 : 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return argc == 3 || argc == 5 ? tessera::run(argc, argv) : 2;
}
