// tessera scan: what the pickles of a file mention.
#include <algorithm>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/scan.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

void print_names(const ScanReport& report, std::ptrdiff_t dangerous) {
  for (const ScannedName& name : report.names) {
    fmt::print("{:<9}  {}  in {} pickle{}, first {}\n", to_string(name.kind), printable(name.name),
               name.pickles, name.pickles == 1 ? "" : "s", printable(name.first));
  }
  fmt::print("{} names in {} pickles, {} dangerous\n", report.names.size(), report.pickles,
             dangerous);
}

void print_report(const ScanReport& report) {
  nlohmann::ordered_json json;
  json["pickles"] = report.pickles;
  json["names"] = nlohmann::ordered_json::array();
  for (const ScannedName& name : report.names) {
    json["names"].push_back({{"name", name.name},
                             {"kind", to_string(name.kind)},
                             {"pickles", name.pickles},
                             {"first", name.first}});
  }
  json["problems"] = report.problems;
  print_json(json);
}

int scan(const std::string& path, const Common& common) {
  const ScanReport report = tessera::scan(path);
  const auto dangerous = std::ranges::count(report.names, NameKind::dangerous, &ScannedName::kind);
  if (common.json) {
    print_report(report);
  } else {
    print_names(report, dangerous);
  }
  for (const std::string& problem : report.problems)
    fmt::print(stderr, "tessera: {}\n", printable(problem));
  if (dangerous > 0) return kNo;
  return report.problems.empty() ? kDone : kFailed;
}

constexpr const char* kExamples = R"(
A known name has a meaning here and becomes a value. An opaque name is any other class; it is kept
as data and never used. A dangerous name could run code, open files or reach the system in Python.
Nothing is run or imported.

Every pickle is scanned: archives and streams of torch.save, .metadata and each item of a
distributed checkpoint, and the archives in a safetensors file's tessera.tree. The exit code is 1 if
a name is dangerous.

Examples:
  tessera scan downloaded.pt
  tessera scan checkpoint/ --json)";

}  // namespace

void add_scan(CLI::App& app, Common& common, Action& action) {
  const auto path = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("scan", "Lists every global name that the pickles mention");
  command->footer(kExamples);
  command->add_option("checkpoint", *path, "file or directory")->required();
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return scan(*path, common); }; });
}

}  // namespace tessera::cli
