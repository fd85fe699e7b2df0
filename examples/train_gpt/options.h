// What the command line of train_gpt says. The flags are stable: scripts and tests rely on them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

enum class Precision { fp32, bf16 };
enum class Sharding { fsdp2, fsdp1, ddp, none };

struct Options {
  std::string data;           // a text file; any bytes will do
  std::int64_t steps = 1000;  // optimizer steps of the whole training, resumed or not

  std::int64_t dim = 256;
  std::int64_t layers = 8;
  std::int64_t heads = 8;
  std::int64_t seq = 128;
  bool tied = false;  // the head uses the embedding's weight

  std::int64_t batch = 8;       // sequences a step, over all ranks and micro-batches
  std::int64_t accumulate = 1;  // micro-batches that each rank cuts its share into
  double lr = 1e-3;
  std::int64_t warmup = 100;  // steps
  double weight_decay = 0.1;
  double clip = 1.0;       // largest gradient norm; 0: no clipping
  std::uint64_t seed = 0;  // of the weights, of the order of the data, of the sample
  int threads = 0;         // of each rank; 0: what libtorch chooses
  Precision dtype = Precision::fp32;
  std::string device;  // type; empty: CUDA where there is a device, else the CPU
  Sharding sharding = Sharding::fsdp2;
  bool flat = false;  // fsdp2: ShardLayout::flat

  std::string save;                  // checkpoints go to SAVE/step{N}
  std::string checkpointer = "dcp";  // or one of OLMo's: full, torch_new, torch_legacy, local
  std::int64_t save_every = 0;       // steps; 0: only after the last step
  bool saves_by_cost = false;        // as often as 2 % of the time of training pays for
  std::string async;           // "thread", "process" or "overlap"; empty: steps wait for saves
  int grace = 30;              // seconds from SIGTERM to the kill
  bool partner = false;        // another host has a copy of that
  int keep_in_memory = 0;      // seconds that processes keep the last save when ranks have died
  std::int64_t keep = 0;       // newest checkpoints that stay; 0: all
  std::string resume;          // a checkpoint, or "latest" of `save`
  std::int64_t val_every = 0;  // steps; 0: never
  std::string metrics;         // a CSV file
  std::string trace;           // a timeline of steps 2 to 4, see tessera/trace.h
  std::int64_t sample = 0;     // bytes of text to write after training
  std::int64_t bench = 0;      // timed steps; 0: train
};

// The options, or the exit code when there is nothing left to do: 0 after --help, 2 after wrong
// usage.
struct CommandLine {
  Options options;
  std::optional<int> exit_code;
};
[[nodiscard]] CommandLine read_command_line(int argc, char** argv);
