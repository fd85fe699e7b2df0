// tessera seal: digests for a checkpoint that somebody else wrote.
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/verify.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct SealArguments {
  std::string path;
  SealOptions seal;
};

int seal(const SealArguments& options, const Common& common) {
  SealReport report;
  {
    ProgressBar bar("seal", common);
    SealOptions how = options.seal;
    how.progress = bar.hook();
    report = tessera::seal(options.path, how);
  }
  if (common.json) {
    nlohmann::ordered_json json;
    json["was_sealed"] = report.was_sealed;
    json["side_file"] = report.side_file;
    json["files"] = report.files;
    json["bytes"] = report.bytes;
    print_json(json);
  } else if (report.was_sealed) {
    fmt::print("ok: already sealed, {} checked\n", human_bytes(report.bytes));
  } else {
    fmt::print("sealed: digests of {}, {}, in {}\n", counted(report.files, "file"),
               human_bytes(report.bytes), printable(report.side_file));
  }
  return kDone;
}

constexpr const char* kSealExamples = R"(
Writes one file of digests beside the checkpoint's own files, which stay as they are. From then on
tessera checks every read of the checkpoint, also of parts of a tensor. A damaged checkpoint is
refused; one that is already sealed is only verified. Digests tell later of a file that is missing, so
they are of all files: there is neither --partial nor --rank.

Examples:
  tessera seal checkpoint/        tessera-SAVE_ID.json in the directory; tessera-digests.json
                                  where there is no .metadata
  tessera seal model.safetensors  model.safetensors.tessera.json beside the file)";

}  // namespace

void add_seal(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<SealArguments>();
  CLI::App* command =
      app.add_subcommand("seal", "Adds digests to a checkpoint that someone else wrote");
  command->footer(kSealExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  add_choice(*command, options->seal.open);
  add_threads(*command, options->seal.threads);
  add_common(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return seal(*options, common); }; });
}

}  // namespace tessera::cli
