// tessera diff: two checkpoints of any kinds, by name.
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

struct Options {
  std::string a;
  std::string b;
  std::vector<std::string> only;
};

void print_document(const std::vector<Difference>& differences) {
  auto list = nlohmann::ordered_json::array();
  for (const Difference& difference : differences) {
    list.push_back({{"kind", to_string(difference.kind)},
                    {"name", difference.name},
                    {"text", difference.text}});
  }
  print_json(list);
}

void print_lines(const std::vector<Difference>& differences) {
  for (const Difference& difference : differences) {
    fmt::print("{:<8} {}  {}\n", to_string(difference.kind), printable(difference.name),
               printable(difference.text));
  }
}

int diff(const Options& options, const Common& common) {
  Checkpoint a = Checkpoint::open(options.a);
  Checkpoint b = Checkpoint::open(options.b);
  keep_only(a, options.only);
  keep_only(b, options.only);
  std::vector<Difference> differences;
  {
    ProgressBar bar("diff", common);
    differences = tessera::diff(a, b, bar.hook());
  }
  if (common.json) {
    print_document(differences);
  } else if (differences.empty()) {
    fmt::print("equal: {} leaves, bit for bit\n", a.leaves.size());
  } else {
    print_lines(differences);
  }
  return differences.empty() ? kDone : kNo;
}

constexpr const char* kExamples = R"(
Kinds may differ; tensors are compared bit for bit. The exit code is 1 if there is a difference.

Examples:
  tessera diff checkpoint/ model.safetensors
  tessera diff step100/ step200/ --only model --json)";

}  // namespace

void add_diff(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "diff", "Compares two checkpoints by name: missing, extra, shape, dtype, values");
  command->footer(kExamples);
  add_only(*command, options->only);
  command->add_option("a", options->a, "file or directory")->required();
  command->add_option("b", options->b, "file or directory")->required();
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return diff(*options, common); }; });
}

}  // namespace tessera::cli
