// tessera scan: what the pickles of a file mention.
#include <algorithm>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/library.h"
#include "tessera/verify.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

std::ptrdiff_t count(const ScanReport& report, NameKind kind) {
  return std::ranges::count(report.names, kind, &ScannedName::kind);
}

void print_names(const ScanReport& report) {
  for (const ScannedName& name : report.names) {
    fmt::print("{:<9}  {}  in {}, first {}{}{}\n", to_string(name.kind), printable(name.name),
               counted(name.pickles, "pickle"), printable(name.first), name.how.empty() ? "" : ": ",
               name.how);
  }
  fmt::print("{} in {}, {} dangerous, {} unknown", counted(report.names.size(), "name"),
             counted(report.pickles, "pickle"), count(report, NameKind::dangerous),
             count(report, NameKind::unknown));
  const std::ptrdiff_t allowed = count(report, NameKind::allowed);
  fmt::print("{}\n", allowed == 0 ? "" : fmt::format(", {} allowed by --allow", allowed));
}

void print_report(const ScanReport& report) {
  nlohmann::ordered_json json;
  json["clean"] = report.clean();
  json["pickles"] = report.pickles;
  json["names"] = nlohmann::ordered_json::array();
  for (const ScannedName& name : report.names) {
    nlohmann::ordered_json row{{"name", name.name},
                               {"kind", to_string(name.kind)},
                               {"pickles", name.pickles},
                               {"first", name.first}};
    if (!name.how.empty()) row["how"] = name.how;
    json["names"].push_back(std::move(row));
  }
  json["problems"] = nlohmann::ordered_json::array();
  for (const Finding& problem : report.problems) json["problems"].push_back(problem.text);
  json["findings"] = json_of_findings(report.problems);
  print_json(json);
}

// SARIF 2.1.0, which code hosts and their checks read: a result for each name that is not vetted or
// allowed, and for each problem.
void print_sarif(const ScanReport& report) {
  using Sarif = nlohmann::ordered_json;
  Sarif results = Sarif::array();
  const auto add = [&results](std::string_view rule, const std::string& text, std::string where) {
    Sarif result{{"ruleId", rule},
                 {"level", rule == to_string(NameKind::dangerous) ? "error" : "warning"},
                 {"message", {{"text", text}}}};
    where = where.substr(0, where.find(':'));
    if (!where.empty())
      result["locations"] = Sarif::array(
          {{{"physicalLocation", {{"artifactLocation", {{"uri", std::move(where)}}}}}}});
    results.push_back(std::move(result));
  };
  for (const ScannedName& name : report.names) {
    if (name.kind < NameKind::unknown) continue;
    add(to_string(name.kind),
        name.name + " in " + name.first + (name.how.empty() ? "" : ": " + name.how), name.first);
  }
  for (const Finding& problem : report.problems) add("problem", problem.text, problem.error.path());
  const Sarif driver{{"name", "tessera"},
                     {"version", version()},
                     {"rules", {{{"id", "dangerous"}}, {{"id", "unknown"}}, {{"id", "problem"}}}}};
  print_json(Sarif{{"version", "2.1.0"},
                   {"$schema", "https://json.schemastore.org/sarif-2.1.0.json"},
                   {"runs", {{{"tool", {{"driver", driver}}}, {"results", std::move(results)}}}}});
}

int scan(const std::string& path, const ScanOptions& options, bool sarif, const Common& common) {
  const ScanReport report = tessera::scan(path, options);
  if (sarif) {
    print_sarif(report);
  } else if (common.json) {
    print_report(report);
  } else {
    print_names(report);
  }
  for (const Finding& problem : report.problems) complain(problem.text);
  if (count(report, NameKind::dangerous) + count(report, NameKind::unknown) > 0) return kNo;
  return report.clean() ? kDone : kFailed;
}

constexpr const char* kScanExamples = R"(
A vetted name was looked at: used like this, it does nothing in Python but build data. An unknown
name is any other; it may run code. A dangerous name does, opens files or reaches the system.
Nothing is run or imported here.

Every pickle is scanned: archives and streams of torch.save, bare pickles, those inside of others,
.metadata and each item of a distributed checkpoint, and the archives in a safetensors file's
tessera.tree. The exit code is 0 if all names are vetted or allowed and everything could be read, 1
if a name is dangerous or unknown, 3 if something could not be scanned: damage, programs in archives
of TorchScript and torch.export, and what Python may read and Tessera does not.

Examples:
  tessera scan downloaded.pt
  tessera scan checkpoint/ --json
  tessera scan model.pt --allow 'my_project.*' --allow __main__.Config)";

}  // namespace

void add_scan(CLI::App& app, Common& common, Action& action) {
  const auto path = std::make_shared<std::string>();
  const auto options = std::make_shared<ScanOptions>();
  const auto sarif = std::make_shared<bool>();
  CLI::App* command = app.add_subcommand(
      "scan", "Lists every name that the pickles would import, and whether it was looked at");
  command->footer(kScanExamples);
  command->add_option("checkpoint", *path, "file or directory")->required();
  one_each(command->add_option(
      "--allow", options->allow,
      "a name or glob of your own classes: no unknown name then; may be repeated"));
  command->add_flag("--sarif", *sarif, "print the report as SARIF 2.1.0");
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback([=, &common, &action] {
    action = [=, &common] { return scan(*path, *options, *sarif, common); };
  });
}

}  // namespace tessera::cli
