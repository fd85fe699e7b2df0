#include "options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <map>
#include <string>

namespace {

void add_model_flags(CLI::App& app, Options& o) {
  app.add_option("--dim", o.dim, "Width of the model")->check(CLI::PositiveNumber);
  app.add_option("--layers", o.layers, "Number of blocks")->check(CLI::PositiveNumber);
  app.add_option("--heads", o.heads, "Attention heads; must divide --dim")
      ->check(CLI::PositiveNumber);
  app.add_option("--seq", o.seq, "Context in bytes")->check(CLI::PositiveNumber);
  app.add_flag("--tied", o.tied, "Use the embedding as the head's weight");
}

void add_training_flags(CLI::App& app, Options& o) {
  const std::map<std::string, Precision> dtypes{{"fp32", Precision::fp32},
                                                {"bf16", Precision::bf16}};
  const std::map<std::string, Sharding> shardings{{"fsdp2", Sharding::fsdp2},
                                                  {"fsdp1", Sharding::fsdp1},
                                                  {"ddp", Sharding::ddp},
                                                  {"none", Sharding::none}};
  app.add_option("--data", o.data, "Text to learn, any file");
  app.add_option("--steps", o.steps, "Steps of the whole training")->check(CLI::NonNegativeNumber);
  app.add_option("--batch", o.batch, "Sequences a step, over all ranks")
      ->check(CLI::PositiveNumber);
  app.add_option("--accumulate", o.accumulate, "Micro-batches a rank makes of its share")
      ->check(CLI::PositiveNumber);
  app.add_option("--lr", o.lr, "Peak learning rate")->check(CLI::NonNegativeNumber);
  app.add_option("--warmup", o.warmup, "Steps until the peak")->check(CLI::NonNegativeNumber);
  app.add_option("--weight-decay", o.weight_decay, "Decay of weights and embeddings")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip", o.clip, "Largest gradient norm; 0: none")->check(CLI::NonNegativeNumber);
  app.add_option("--seed", o.seed, "Of weights, data order and sample");
  app.add_option("--threads", o.threads, "Threads of each rank; 0: libtorch's choice")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--device", o.device, "cpu or cuda; by default cuda where there is one")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->type_name("cpu|cuda");
  app.add_option("--dtype", o.dtype, "fp32, or bf16 for the computation (weights stay fp32)")
      ->transform(CLI::CheckedTransformer(dtypes).description(""))
      ->type_name("fp32|bf16");
  app.add_option("--sharding", o.sharding, "fsdp2, fsdp1, ddp, or none for one rank alone")
      ->transform(CLI::CheckedTransformer(shardings).description(""))
      ->type_name("fsdp2|fsdp1|ddp|none");
  app.add_flag("--flat", o.flat, "With fsdp2: parameters of a block end to end, not cut by rows");
}

void add_output_flags(CLI::App& app, Options& o) {
  app.add_option("--save", o.save,
                 "Directory of the checkpoints step{N}: a path, or a URL as s3://bucket/run");
  app.add_option("--checkpointer", o.checkpointer,
                 "How they are laid out: as PyTorch's DCP, or as one of OLMo's checkpointers does")
      ->check(CLI::IsMember({"dcp", "full", "torch_new", "torch_legacy", "local"}).description(""))
      ->type_name("dcp|full|torch_new|torch_legacy|local");
  app.add_option_function<std::string>(
         "--save-every",
         [&o](const std::string& given) {
           o.saves_by_cost = given == "auto";
           if (!o.saves_by_cost) o.save_every = std::stoll(given);
         },
         "Steps; 0: only at the end; auto: as often as 2 % of the time of training pays for")
      ->check((CLI::NonNegativeNumber | CLI::IsMember({"auto"})).description(""))
      ->type_name("N|auto");
  app.add_option("--async", o.async,
                 "Save while the training goes on: by a thread, or by a process that outlives it; "
                 "overlap: by a thread that also copies while it goes on")
      ->check(CLI::IsMember({"thread", "process", "overlap"}).description(""))
      ->type_name("thread|process|overlap");
  app.add_option("--keep-in-memory", o.keep_in_memory,
                 "With --async process: seconds for which the last save stays in memory when the "
                 "ranks have died, so that --resume latest on this host reads it from there")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--partner", o.partner,
               "With --keep-in-memory: another host has a copy, for when this one is lost");
  app.add_option("--grace", o.grace,
                 "Seconds from SIGTERM to the kill: a last checkpoint is saved if they suffice")
      ->check(CLI::PositiveNumber);
  app.add_option("--keep", o.keep, "Newest checkpoints to keep; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option(
      "--resume", o.resume,
      "A checkpoint, or 'latest' of --save: before the first one the training starts afresh");
  app.add_option("--val-every", o.val_every, "Steps between validations; 0: never")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--metrics", o.metrics, "CSV file, one row a step");
  app.add_option("--trace", o.trace, "Timeline of steps 2 to 4 of this run, for chrome://tracing");
  app.add_option("--sample", o.sample, "Bytes of text to write at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--bench", o.bench, "Time N steps on random data instead of training")
      ->check(CLI::NonNegativeNumber);
}

// What no single flag can check. Empty: all is well.
std::string contradiction(const Options& o) {
  if (o.dim % o.heads != 0) return "--heads must divide --dim";
  if (o.bench == 0 && o.data.empty()) return "--data is required";
  if (o.resume == "latest" && o.save.empty()) return "--resume latest needs --save";
  if ((o.save_every > 0 || o.saves_by_cost) && o.save.empty()) return "--save-every needs --save";
  const char* world = std::getenv("WORLD_SIZE");
  if (o.sharding == Sharding::none && world != nullptr && std::string(world) != "1") {
    return "--sharding none is for one rank alone";
  }
  if (o.flat && o.sharding != Sharding::fsdp2) return "--flat is for --sharding fsdp2";
  if (!o.async.empty() && o.checkpointer != "dcp") return "--async is for --checkpointer dcp";
  if (!o.async.empty() && o.save.empty()) return "--async needs --save";
  if (o.keep > 0 && o.save.empty()) return "--keep needs --save";
  if (o.keep_in_memory > 0 && o.async != "process") return "--keep-in-memory needs --async process";
  if (o.partner && o.keep_in_memory == 0) return "--partner needs --keep-in-memory";
  return {};
}

}  // namespace

CommandLine read_command_line(int argc, char** argv) {
  CommandLine result;
  CLI::App app(
      "Trains a byte-level GPT, alone or sharded over ranks that torchrun --no-python, mpirun or "
      "srun starts");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_model_flags(app, result.options);
  add_training_flags(app, result.options);
  add_output_flags(app, result.options);
  try {
    app.parse(argc, argv);
    const std::string problem = contradiction(result.options);
    if (!problem.empty()) throw CLI::ValidationError(problem);
  } catch (const CLI::ParseError& error) {
    result.exit_code = app.exit(error) == 0 ? 0 : 2;
  }
  return result;
}
