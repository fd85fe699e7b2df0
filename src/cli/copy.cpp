// tessera copy: a checkpoint, byte for byte, from one place to another.
#include <chrono>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "cli/stop.h"
#include "tessera/copy.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct CopyArguments {
  std::string source;
  std::string target;
  CopyOptions copy;
};

void print_document(const CopyReport& report, const std::string& target, double seconds) {
  nlohmann::ordered_json json;
  json["target"] = target;
  json["checkpoints"] = report.checkpoints;
  json["files"] = report.files;
  json["bytes"] = report.bytes;
  json["whole_files"] = report.whole_files;
  json["whole_bytes"] = report.whole_bytes;
  json["server_bytes"] = report.server_bytes;
  json["passed_over"] = nlohmann::ordered_json::array();
  for (const PassedOver& rest : report.passed_over)
    json["passed_over"].push_back({{"name", rest.name}, {"reason", rest.reason}});
  json["seconds"] = seconds;
  print_json(json);
}

void print_text(const CopyReport& report, const std::string& target, double seconds) {
  fmt::print("{}: {}, {} in {:.2f} s", printable(target), counted(report.files, "file"),
             human_bytes(report.bytes), seconds);
  if (report.checkpoints > 1) fmt::print("; {} checkpoints", report.checkpoints);
  if (report.whole_files > 0)
    fmt::print("; {} were there already, {}", report.whole_files, human_bytes(report.whole_bytes));
  if (report.server_bytes > 0)
    fmt::print("; the server copied {}", human_bytes(report.server_bytes));
  fmt::print("\n");
  for (const PassedOver& rest : report.passed_over)
    fmt::print("note: {} is not copied: {}\n", printable(rest.name), rest.reason);
}

int copy(const CopyArguments& options, const Common& common) {
  const auto begin = std::chrono::steady_clock::now();
  CopyReport report;
  CopyOptions how = options.copy;
  const StopOnSignal signals;
  how.stop = signals.token();
  try {
    ProgressBar bar("copy", common);
    how.progress = bar.hook();
    report = tessera::copy(options.source, options.target, how);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) {
      signals.end_by_signal(
          "files that are whole at the target stay; run again, the copy goes on with them");
    }
    if (!how.overwrite) refuse_to_replace(error, true);
    throw;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (common.json) {
    print_document(report, options.target, seconds);
  } else if (!common.quiet) {
    print_text(report, options.target, seconds);
  }
  return kDone;
}

constexpr const char* kCopyExamples = R"(
Copies a file, a directory of any kind, or all complete checkpoints of a run, byte for byte: what was
sealed stays sealed, and digests are compared on the way. The marker of a checkpoint comes last. A
copy that is interrupted or killed has none; run again, it goes on, and skips files that are whole at
the target. A checkpoint that is still being written is incomplete. All that lies in the directory is
copied, whatever the index says and of all ranks: there is no --rank, and the options of opening only
say when it counts as whole.

Inside one object store the server copies, and no data comes through this machine.

Examples:
  tessera copy step1000/ s3://bucket/run/step1000
  tessera copy s3://bucket/run/step1000 /data/step1000 --threads 8
  tessera copy s3://bucket/run s3://archive/run
  tessera copy https://host/model.safetensors models/
  until tessera copy run/ s3://bucket/run; do sleep 60; done)";

}  // namespace

void add_copy(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<CopyArguments>();
  CLI::App* command =
      app.add_subcommand("copy", "Copies a checkpoint as it is to another disk or object store");
  command->footer(kCopyExamples);
  command->add_option("source", options->source, "file, checkpoint directory or run")->required();
  command->add_option("target", options->target, "file or directory")->required();
  command->add_flag("--overwrite", options->copy.overwrite, "replace another checkpoint");
  command->add_flag("--single-writer", options->copy.single_writer,
                    "nobody else writes the target: needed on servers that keep no rivals out");
  command->add_flag("--allow-incomplete,--partial", options->copy.allow_incomplete,
                    "copy also a checkpoint whose files are not all there");
  add_choice(*command, options->copy.open);
  command->add_flag("--read-back", options->copy.read_back,
                    "read each file again from the target and compare");
  command->add_option("--threads", options->copy.threads, "files that are copied at once")
      ->check(CLI::Range(1, 1024));
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return copy(*options, common); }; });
}

}  // namespace tessera::cli
