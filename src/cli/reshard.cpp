// tessera reshard: the same kind of checkpoint for another number of ranks.
#include <memory>

#include "checkpoint/open/kinds.h"
#include "cli/commands.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

struct ReshardArguments {
  std::string source;
  std::string target;
  ConvertOptions convert;
};

// Its metadata may be large, and is read once.
ConvertReport reshard(const ReshardArguments& options, ConvertOptions how) {
  const Checkpoint source = opened(options.source, how.open);
  how.to = source.kind;
  if (!row_of(how.to).is_split) {
    throw Error(ErrorCode::invalid_argument, "a checkpoint of kind " +
                                                 std::string(to_string(how.to)) +
                                                 " is not split over ranks: use convert")
        .at_path(options.source);
  }
  return convert(source, options.target, how);
}

}  // namespace

void add_reshard(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<ReshardArguments>();
  CLI::App* command = app.add_subcommand(
      "reshard", "Writes the same kind of checkpoint (DCP, OLMo) for another number of ranks");
  command->footer(R"(
Examples:
  tessera reshard step1000/ step1000-on-8/ --ranks 8)");
  command->add_option("source", options->source, "DCP or OLMo checkpoint")->required();
  command->add_option("target", options->target, "directory")->required();
  command->add_option("--ranks", options->convert.ranks, "the new number of ranks")
      ->required()
      ->check(CLI::Range(1, 1 << 20));
  add_presence(*command, options->convert.open);
  add_olmo(*command, options->convert);
  add_work(*command, options->convert);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback([=, &common, &action] {
    action = [=, &common] {
      return run_conversion(
          "reshard", [&](const ConvertOptions& how) { return reshard(*options, how); },
          options->convert, common);
    };
  });
}

}  // namespace tessera::cli
