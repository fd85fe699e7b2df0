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
#include "value/render.h"

namespace tessera::cli {
namespace {

struct Options {
  std::string source;
  std::string target;
  std::string to;
  std::string dtype;
  ConvertOptions convert;
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

DType dtype_of(const std::string& name) {
  if (name == "bf16") return DType::bfloat16;
  return name == "fp16" ? DType::float16 : DType::float32;
}

// Bytes read for a byte that was needed.
double amplification(const IoReport& io) {
  return io.bytes_needed == 0
             ? 1.0
             : static_cast<double>(io.bytes_read) / static_cast<double>(io.bytes_needed);
}

int convert(const Options& options, const Common& common) {
  ConvertOptions how = options.convert;
  if (!options.dtype.empty()) how.dtype = dtype_of(options.dtype);
  how.to = kind_of(options);
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
    json["read_per_needed"] = amplification(report.io);
    json["bytes_unchecked"] = report.io.bytes_unchecked;
    json["bytes_written"] = report.io.bytes_written;
    json["seconds"] = seconds;
    fmt::print("{}\n", json.dump(1));
  } else if (!common.quiet) {
    fmt::print("{}: {} tensors, {} read ({:.2f} of what was needed), {} written in {:.2f} s",
               printable(options.target), report.tensors, human_bytes(report.io.bytes_read),
               amplification(report.io), human_bytes(report.io.bytes_written), seconds);
    if (report.values_in_metadata > 0) {
      fmt::print("; {} values that are not tensors travel in the file's metadata",
                 report.values_in_metadata);
    }
    fmt::print("\n");
  }
  return kDone;
}

constexpr const char* kExamples = R"(
Every byte of the source is read once and its checksums are checked; the target appears whole or not
at all. Values that a target cannot hold natively travel in its metadata, so the way back gives the
same tree.

Examples:
  tessera convert checkpoint/ model.safetensors
  tessera convert checkpoint/ model.safetensors --only model --dtype bf16 --rename '^model\.=>'
  tessera convert model.pt checkpoint/ --to dcp --threads 8 --memory 256MiB
  tessera convert run/step100 copy.pt --only 'model.layers.[0-3].*' --json)";

}  // namespace

void add_convert(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("convert", "Streams a checkpoint into another kind, in bounded memory");
  command->footer(kExamples);
  command->add_option("source", options->source, "file or directory")->required();
  command->add_option("target", options->target, "file (.safetensors, .pt) or directory")
      ->required();
  command->add_option("--to", options->to, "kind of the target; default: by its extension")
      ->check(CLI::IsMember({"dcp", "torch", "safetensors"}));
  command->add_option("--only", options->convert.only,
                      "model, optim, or names that match this glob; may be repeated");
  command->add_option("--rename", options->convert.rename,
                      "RE=>TO: all matches in names become TO; may be repeated");
  command->add_option("--dtype", options->dtype, "element type of all floating tensors")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  command->add_option("--threads", options->convert.threads, "working threads")
      ->check(CLI::Range(1, 1024));
  command->add_option("--memory", options->convert.memory, "all buffers together, e.g. 64MiB")
      ->transform(CLI::AsSizeValue(false));
  command->add_flag("--overwrite", options->convert.overwrite,
                    "replace an existing target, atomically");
  add_common(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return convert(*options, common); }; });
}

}  // namespace tessera::cli
