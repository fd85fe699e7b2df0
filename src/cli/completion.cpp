#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/text.h"
#include "cli/commands.h"
#include "tessera/error.h"

namespace tessera::cli {

// tessera completion: scripts that complete commands and options in a shell.

namespace {

struct Command {
  std::string name;
  std::string description;
  std::set<std::string> options;  // with their dashes
};

std::vector<Command> commands_of(const CLI::App& app) {
  std::vector<Command> commands;
  for (const CLI::App* subcommand : app.get_subcommands(nullptr)) {
    Command command{subcommand->get_name(), subcommand->get_description(), {}};
    for (const CLI::Option* option : subcommand->get_options()) {
      for (const std::string& name : option->get_lnames()) command.options.insert("--" + name);
    }
    commands.push_back(std::move(command));
  }
  return commands;
}

std::string joined(const std::set<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

void print_bash(const std::vector<Command>& commands) {
  std::string names;
  std::string cases;
  for (const Command& command : commands) {
    names += (names.empty() ? "" : " ") + command.name;
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command.name, joined(command.options));
  }
  fmt::print(R"(_tessera() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" = 1 ]; then
    words="{} --help --version"
  else
    case ${{COMP_WORDS[1]}} in
{}    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -o bashdefault -F _tessera tessera
)",
             names, cases);
}

// Descriptions stand in the shells' single quotes, and none of ours has one.
void print_zsh(const std::vector<Command>& commands) {
  std::string names;
  std::string cases;
  for (const Command& command : commands) {
    names += fmt::format("    '{}:{}'\n", command.name, command.description);
    cases += fmt::format("    {}) offered=({}) ;;\n", command.name, joined(command.options));
  }
  fmt::print(R"(#compdef tessera
_tessera() {{
  local -a commands offered
  commands=(
{}  )
  if (( CURRENT == 2 )); then
    _describe command commands
    compadd -- --help --version
    return
  fi
  case ${{words[2]}} in
{}  esac
  if [[ ${{words[CURRENT]}} == -* ]]; then
    compadd -- $offered
  else
    _files
  fi
}}
if [[ ${{zsh_eval_context[-1]}} == loadautofunc ]]; then
  _tessera "$@"
else
  compdef _tessera tessera
fi
)",
             names, cases);
}

void print_fish(const std::vector<Command>& commands) {
  fmt::print("complete -c tessera -n __fish_use_subcommand -l help\n");
  fmt::print("complete -c tessera -n __fish_use_subcommand -l version\n");
  for (const Command& command : commands) {
    fmt::print("complete -c tessera -n __fish_use_subcommand -f -a {} -d '{}'\n", command.name,
               command.description);
    for (const std::string& option : command.options) {
      fmt::print("complete -c tessera -n '__fish_seen_subcommand_from {}' -l {}\n", command.name,
                 option.substr(2));
    }
  }
}

int completion(const CLI::App& app, const std::string& shell) {
  const std::vector<Command> commands = commands_of(app);
  if (shell == "zsh") {
    print_zsh(commands);
  } else if (shell == "fish") {
    print_fish(commands);
  } else {
    print_bash(commands);
  }
  return kDone;
}

constexpr const char* kCompletionExamples = R"(
Examples:
  source <(tessera completion)
  tessera completion bash > ~/.local/share/bash-completion/completions/tessera
  tessera completion zsh > ~/.zsh/completions/_tessera       a directory of $fpath
  tessera completion fish > ~/.config/fish/completions/tessera.fish)";

}  // namespace

void add_completion(CLI::App& app, Action& action) {
  const auto shell = std::make_shared<std::string>("bash");
  CLI::App* command =
      app.add_subcommand("completion", "Prints a completion script for bash, zsh or fish");
  command->footer(kCompletionExamples);
  one_of(command->add_option("shell", *shell, "default: bash"), {"bash", "zsh", "fish"});
  command->callback([=, &app, &action] { action = [=, &app] { return completion(app, *shell); }; });
}

// tessera help COMMAND: what tessera COMMAND --help prints.

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
