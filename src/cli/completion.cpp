// tessera completion: a script that completes commands and options in bash.
#include <set>
#include <string>

#include <fmt/format.h>

#include "cli/commands.h"

namespace tessera::cli {
namespace {

std::string options_of(const CLI::App& command) {
  std::set<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.insert("--" + name);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

int completion(const CLI::App& app) {
  std::string commands;
  std::string cases;
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    commands += (commands.empty() ? "" : " ") + command->get_name();
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command->get_name(), options_of(*command));
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
             commands, cases);
  return kDone;
}

constexpr const char* kExamples = R"(
Examples:
  source <(tessera completion)
  tessera completion > ~/.local/share/bash-completion/completions/tessera)";

}  // namespace

void add_completion(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("completion", "Prints completion for bash");
  command->footer(kExamples);
  command->callback([&app, &action] { action = [&app] { return completion(app); }; });
}

}  // namespace tessera::cli
