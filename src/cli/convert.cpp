// tessera convert: any kind into any other, streamed.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/open/kinds.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "cli/stop.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

std::vector<std::string> names_of_targets() {
  std::vector<std::string> names;
  for (const KindRow& kind : kKinds) {
    if (kind.is_written) names.emplace_back(kind.name);
  }
  return names;
}

constexpr const char* kConvertExamples = R"(
The source is streamed, and its checksums are checked. The target appears whole or not at all. A run
that is interrupted (SIGINT, SIGTERM, SIGHUP) leaves nothing behind. With --resume it leaves the
files that it has finished in .NAME.resume beside the target (.resume inside a DCP directory); the
next run with --resume keeps those that are intact. A target that is one file begins anew. Values
that a target cannot hold natively travel in its metadata, so converting back gives the same tree.

Examples:
  tessera convert checkpoint/ model.safetensors
  tessera convert checkpoint/ model.safetensors --only model --dtype bf16 --rename '^model\.=>'
  tessera convert model.pt checkpoint/ --to dcp --threads 8 --memory 256MiB
  tessera convert padded/ model.safetensors --slice 'model.embed.weight[0:50257]'
  tessera convert run/step100 copy.pt --only 'model.layers.[0-3].*' --json
  tessera convert hf/pytorch_model.bin.index.json weights --to safetensors
  until tessera convert model.pt checkpoint/ --to dcp --ranks 8 --resume; do sleep 60; done)";

struct ConvertArguments {
  std::string source;
  std::string target;
  std::string to;
  std::string dtype;
  ConvertOptions convert;
  bool dequantize = false;
};

CheckpointKind kind_of(const ConvertArguments& options) {
  if (!options.to.empty()) return kind_named(options.to);
  if (const auto kind = kind_of_target(options.target)) return *kind;
  throw Error(
      ErrorCode::invalid_argument,
      "the target's name does not say its kind: add --to dcp, torch, safetensors or olmo-...")
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

void print_document(const ConvertReport& report, double seconds) {
  nlohmann::ordered_json json;
  json["target"] = report.target;
  json["tensors"] = report.tensors;
  json["values_in_metadata"] = report.values_in_metadata;
  json["bytes_needed"] = report.io.bytes_needed;
  json["bytes_read"] = report.io.bytes_read;
  json["read_per_needed"] = amplification(report.io);
  json["bytes_unchecked"] = report.io.bytes_unchecked;
  json["bytes_written"] = report.io.bytes_written;
  json["requests"] = report.io.requests;
  json["retries"] = report.io.retries;
  json["bytes_again"] = report.io.bytes_again;
  json["bytes_resumed"] = report.bytes_resumed;
  json["notes"] = report.notes;
  json["seconds"] = seconds;
  print_json(json);
}

void print_text(const ConvertReport& report, double seconds) {
  fmt::print("{}: {}, {} read ({:.2f} times what was needed), {} written in {:.2f} s",
             printable(report.target), counted(report.tensors, "tensor"),
             human_bytes(report.io.bytes_read), amplification(report.io),
             human_bytes(report.io.bytes_written), seconds);
  if (report.io.requests > 0) fmt::print("; {}", counted(report.io.requests, "request"));
  if (report.io.retries > 0) {
    fmt::print(", {} of them again with {}", report.io.retries, human_bytes(report.io.bytes_again));
  }
  if (report.bytes_resumed > 0) {
    fmt::print("; {} kept from an interrupted run", human_bytes(report.bytes_resumed));
  }
  if (report.values_in_metadata > 0) {
    fmt::print("; {} values that are not tensors travel in the file's metadata",
               report.values_in_metadata);
  }
  fmt::print("\n");
  for (const std::string& note : report.notes) fmt::print("note: {}\n", printable(note));
}

int convert(const ConvertArguments& options, const Common& common) {
  ConvertOptions how = options.convert;
  if (!options.dtype.empty()) how.dtype = dtype_of(options.dtype);
  if (options.dequantize) how.dequantize = how.dtype.value_or(DType::float32);
  how.to = kind_of(options);
  return run_conversion(
      "convert",
      [&](const ConvertOptions& with) {
        return tessera::convert(options.source, options.target, with);
      },
      how, common);
}

}  // namespace

int run_conversion(const std::string& verb, const Conversion& convert, ConvertOptions how,
                   const Common& common) {
  const auto begin = std::chrono::steady_clock::now();
  ConvertReport report;
  const StopOnSignal signals;
  how.stop = signals.token();
  try {
    ProgressBar bar(verb, common);
    how.progress = bar.hook();
    report = convert(how);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) {
      signals.end_by_signal(how.resume ? "finished files are kept for the next run with --resume"
                                       : "nothing is left behind");
    }
    if (!how.overwrite) refuse_to_replace(error, is_one_file(how.to));
    throw;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (common.json) {
    print_document(report, seconds);
  } else if (!common.quiet) {
    print_text(report, seconds);
  }
  return kDone;
}

void add_work(CLI::App& command, ConvertOptions& options) {
  add_threads(command, options.threads);
  as_size(
      command.add_option("--memory", options.memory, "limit for all buffers together, e.g. 64MiB"),
      false);
  command.add_flag("--overwrite", options.overwrite, "replace an existing target, atomically");
  command.add_flag("--single-writer", options.single_writer,
                   "nobody else writes the target: needed on servers that keep no rivals out");
  command.add_flag(
      "--resume", options.resume,
      "keep the files that an interrupted run finished; if this one is interrupted, keep its own");
}

void add_olmo(CLI::App& command, ConvertOptions& options) {
  command.add_option(
      "--unit", options.olmo.unit,
      "olmo-local: regular expression (RE2's syntax); each module whose path matches has a flat "
      "parameter of its own; default: as the source, else each blocks.N");
  command.add_flag_function(
      "--orig-params,!--no-orig-params",
      [&options](std::int64_t count) { options.olmo.orig_params = count > 0; },
      "olmo-local: align parameters to 16 bytes, as use_orig_params=True does; default: as the "
      "source, else yes");
  command.add_option("--config", options.olmo.config, "config.yaml to copy; default: the source's");
}

void add_convert(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<ConvertArguments>();
  CLI::App* command =
      app.add_subcommand("convert", "Streams a checkpoint into another kind, in bounded memory");
  command->footer(kConvertExamples);
  command->add_option("source", options->source, "file or directory")->required();
  command
      ->add_option("target", options->target,
                   "file (.safetensors, .pt, .pth, .bin, .ckpt) or directory")
      ->required();
  one_of(
      command->add_option("--to", options->to,
                          "kind of the target; default: from its extension. In a directory that is "
                          "there, or TARGET/, torch and safetensors write model.pt and "
                          "model.safetensors"),
      names_of_targets());
  add_only(*command, options->convert.only);
  one_each(command->add_option(
      "--slice", options->convert.slice,
      "NAME[0:10]: of this tensor these rows alone, as Python slices them; may be repeated"));
  one_each(command->add_option(
      "--rename", options->convert.rename,
      "RE=>TO: replace matches of RE (RE2's syntax) in names by TO, in which \\1 and $1 are its "
      "first group; may be repeated"));
  one_of(command->add_option("--dtype", options->dtype,
                             "element type of all floating tensors; float8 and smaller stay as "
                             "they are, see --dequantize"),
         {"bf16", "fp16", "fp32"});
  command->add_flag(
      "--dequantize", options->dequantize,
      "turn block-scaled float8, MXFP4 and GGUF's Q8_0, Q4_0 and Q4_1 weights into floating point: "
      "--dtype, else fp32");
  command
      ->add_option("--ranks", options->convert.ranks,
                   "dcp and olmo kinds except olmo-full: number of ranks to write for")
      ->check(CLI::Range(1, 1 << 20));
  as_size(
      command->add_option("--max-shard-size", options->convert.max_shard_size,
                          "safetensors: write files of at most this size and an index, e.g. 5GB"),
      true);
  command->add_flag("--keep-duplicates", options->convert.keep_duplicates,
                    "safetensors: write a tensor that has several names (tied weights) under each "
                    "of them; else once, and the metadata notes the other names");
  as_size(
      command->add_option("--header-limit", options->convert.open.header_limit,
                          "read headers of safetensors and GGUF up to this size; default: 100MB"),
      true);
  add_open(*command, options->convert.open);
  add_olmo(*command, options->convert);
  add_work(*command, options->convert);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return convert(*options, common); }; });
}

}  // namespace tessera::cli
