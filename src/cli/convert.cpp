// tessera convert: any kind into any other, streamed.
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

struct Options {
  std::string source;
  std::string target;
  std::string to;
  ConvertOptions convert;
  bool dequantize = false;
  std::string dtype = "float32";  // of dequantized weights
};

CheckpointKind kind_of(const Options& options) {
  const std::string extension = std::filesystem::path(options.target).extension().string();
  if (options.to == "safetensors" || (options.to.empty() && extension == ".safetensors")) {
    return CheckpointKind::safetensors;
  }
  if (options.to == "torch" ||
      (options.to.empty() && (extension == ".pt" || extension == ".pth"))) {
    return CheckpointKind::torch_file;
  }
  if (options.to == "dcp") return CheckpointKind::dcp;
  throw Error(ErrorCode::invalid_argument,
              "say --to dcp, torch or safetensors: the target's name does not tell")
      .at_path(options.target);
}

int convert(const Options& options, const Common& common) {
  ConvertOptions how = options.convert;
  how.to = kind_of(options);
  if (options.dequantize) how.dequantize = dtype_from_torch(options.dtype);
  const auto begin = std::chrono::steady_clock::now();
  ConvertReport report;
  {
    ProgressBar bar("convert", common);
    how.progress = bar.hook();
    report = tessera::convert(options.source, options.target, how);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (common.json) {
    nlohmann::ordered_json json;
    json["tensors"] = report.tensors;
    json["values_in_metadata"] = report.values_in_metadata;
    json["bytes_needed"] = report.io.bytes_needed;
    json["bytes_read"] = report.io.bytes_read;
    json["bytes_unchecked"] = report.io.bytes_unchecked;
    json["bytes_written"] = report.io.bytes_written;
    json["seconds"] = seconds;
    fmt::print("{}\n", json.dump(1));
  } else if (!common.quiet) {
    fmt::print("{}: {} tensors, {} read, {} written in {:.2f} s", options.target, report.tensors,
               human_bytes(report.io.bytes_read), human_bytes(report.io.bytes_written), seconds);
    if (report.values_in_metadata > 0) {
      fmt::print("; {} values that are not tensors travel in the file's metadata",
                 report.values_in_metadata);
    }
    fmt::print("\n");
  }
  return kDone;
}

}  // namespace

void add_convert(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("convert", "Streams a checkpoint into another kind, in bounded memory");
  command->add_option("source", options->source, "file or directory")->required();
  command->add_option("target", options->target, "file (.safetensors, .pt) or directory")
      ->required();
  command->add_option("--to", options->to, "kind of the target; default: by its extension")
      ->check(CLI::IsMember({"dcp", "torch", "safetensors"}));
  command->add_option("--only", options->convert.only,
                      "names that match this glob; may be repeated");
  command->add_option("--threads", options->convert.threads, "working threads")
      ->check(CLI::Range(1, 1024));
  command->add_option("--memory", options->convert.memory, "all buffers together, e.g. 64MiB")
      ->transform(CLI::AsSizeValue(false));
  command
      ->add_option("--max-shard-size", options->convert.max_shard_size,
                   "safetensors: several files of at most this size and an index, e.g. 5GB")
      ->transform(CLI::AsSizeValue(true));
  CLI::Option* dequantize =
      command->add_flag("--dequantize", options->dequantize,
                        "block-scaled float8 and MXFP4 weights become floating point");
  command->add_option("--dtype", options->dtype, "of dequantized weights; default: float32")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16", "float64"}))
      ->needs(dequantize);
  command
      ->add_option("--header-limit", options->convert.open.header_limit,
                   "longest safetensors header that is read; default: 100MB")
      ->transform(CLI::AsSizeValue(true));
  command->add_flag("--overwrite", options->convert.overwrite,
                    "replace an existing target, atomically");
  add_common(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return convert(*options, common); }; });
}

}  // namespace tessera::cli
