// tessera unshard: a sharded training checkpoint into OLMo's unsharded files.
#include <memory>

#include "cli/commands.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

struct UnshardArguments {
  std::string source;
  std::string target;
  ConvertOptions convert;
};

}  // namespace

void add_unshard(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<UnshardArguments>();
  options->convert.to = CheckpointKind::olmo_full;
  CLI::App* command = app.add_subcommand("unshard",
                                         "Writes a checkpoint as the unsharded files of OLMo: "
                                         "model.pt, optim.pt, train.pt, config.yaml");
  command->footer(R"(
Examples:
  tessera unshard step1000/ step1000-unsharded/
  tessera unshard step1000/ model/ --model-only --safetensors)");
  command
      ->add_option("source", options->source,
                   "checkpoint of any kind; what it has no state of is left out")
      ->required();
  command->add_option("target", options->target, "directory")->required();
  command->add_flag("--safetensors", options->convert.olmo.safetensors,
                    "write model and optim as safetensors, with OLMo's names");
  command->add_flag("--model-only", options->convert.olmo.model_only,
                    "write no optimizer and no trainer state");
  command->add_option("--config", options->convert.olmo.config,
                      "config.yaml to copy; default: the source's");
  add_presence(*command, options->convert.open);
  add_work(*command, options->convert);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback([=, &common, &action] {
    action = [=, &common] {
      return run_conversion(
          "unshard",
          [&](const ConvertOptions& how) { return convert(options->source, options->target, how); },
          options->convert, common);
    };
  });
}

}  // namespace tessera::cli
