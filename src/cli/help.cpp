// tessera help COMMAND: what tessera COMMAND --help prints.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/suggest.h"
#include "cli/commands.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

int print_help(const CLI::App& app, const std::string& name) {
  // app.help() would be that of the command that was named, which is this one.
  const std::string text = name.empty() ? app.get_formatter()->make_help(&app, app.get_name(),
                                                                         CLI::AppFormatMode::Normal)
                                        : command_named(app, name).help(app.get_name());
  fmt::print("{}", text);
  return kDone;
}

}  // namespace

const CLI::App& command_named(const CLI::App& app, const std::string& typed) {
  const std::vector<const CLI::App*> commands = app.get_subcommands(nullptr);
  const auto found = std::ranges::find(commands, typed, &CLI::App::get_name);
  if (found != commands.end()) return **found;
  std::vector<std::string> names(commands.size());
  std::ranges::transform(commands, names.begin(), &CLI::App::get_name);
  const std::string meant = nearest(typed, names);
  throw Error(ErrorCode::invalid_argument, "unknown command '" + typed + "', " +
                                               (meant.empty() ? "tessera --help lists all commands"
                                                              : "did you mean " + meant + "?"));
}

void add_help(CLI::App& app, Action& action) {
  const auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("help", "Prints the help of a command");
  command->add_option("command", *name, "default: all commands");
  command->callback([=, &app, &action] { action = [=, &app] { return print_help(app, *name); }; });
}

}  // namespace tessera::cli
