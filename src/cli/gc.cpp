// tessera gc: what killed writers left.
#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/run_directory.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct GcArguments {
  std::string target;
  std::int64_t older_than = 24 * 3600;  // seconds
  bool uploads = false;
  bool remove = false;
};

const char* name_of(LeftoverKind kind) {
  switch (kind) {
    case LeftoverKind::file:
      return "file";
    case LeftoverKind::directory:
      return "directory";
    case LeftoverKind::upload:
      return "upload";
  }
  return "";
}

std::string age_text(const Leftover& leftover) {
  if (!leftover.age) return "?";
  const auto seconds = leftover.age->count();
  if (seconds < 3600) return fmt::format("{} min", seconds / 60);
  if (seconds < 48 * 3600) return fmt::format("{} h", seconds / 3600);
  return fmt::format("{} d", seconds / (24 * 3600));
}

std::uint64_t bytes_of(const GcReport& report) {
  std::uint64_t bytes = 0;
  for (const Leftover& leftover : report.leftovers) bytes += leftover.bytes;
  return bytes;
}

void print_document(const GcReport& report) {
  nlohmann::ordered_json json;
  json["leftovers"] = nlohmann::ordered_json::array();
  for (const Leftover& leftover : report.leftovers) {
    nlohmann::ordered_json row{{"kind", name_of(leftover.kind)},
                               {"path", leftover.path},
                               {"bytes", leftover.bytes},
                               {"age", nullptr},
                               {"removed", leftover.removed}};
    if (leftover.age) row["age"] = leftover.age->count();
    if (!leftover.problem.empty()) row["problem"] = leftover.problem;
    json["leftovers"].push_back(std::move(row));
  }
  json["bytes"] = bytes_of(report);
  json["spared"] = report.spared;
  print_json(json);
}

void print_text(const GcReport& report) {
  for (const Leftover& leftover : report.leftovers) {
    fmt::print("{:<9}  {:>10}  {:>7}  {}{}\n", name_of(leftover.kind), human_bytes(leftover.bytes),
               age_text(leftover), printable(leftover.path), leftover.removed ? "  removed" : "");
  }
  fmt::print("{} left by killed writers, {}; {} spared that are younger or in use\n",
             report.leftovers.size(), human_bytes(bytes_of(report)), report.spared);
}

int gc(const GcArguments& options, const Common& common) {
  const GcOptions how{.remove = options.remove,
                      .older_than = std::chrono::seconds(options.older_than)};
  const GcReport report =
      options.uploads ? tessera::gc_uploads(options.target, how) : tessera::gc(options.target, how);
  if (common.json) {
    print_document(report);
  } else {
    print_text(report);
  }
  for (const Leftover& leftover : report.leftovers) {
    if (!leftover.problem.empty()) complain(leftover.problem);
  }
  const bool all = std::ranges::all_of(
      report.leftovers, [](const Leftover& leftover) { return leftover.problem.empty(); });
  return all ? kDone : kFailed;
}

constexpr const char* kGcExamples = R"(
Lists what killed saves, conversions and copies left: unfinished files and directories, what waits
for --resume, empty directories of steps, and data of attempts that no .metadata names. With --uploads
it lists unfinished uploads of an object store instead, which no listing shows and which cost money; those of
other tools are never touched. Nothing is removed without --delete. What is younger than a day stays,
as may be of a writer that lives; on a disk so does whatever a writer has locked. The exit code is 3 if
something could not be removed.

Examples:
  tessera gc run/
  tessera gc run/ --delete --older-than 2h
  tessera gc s3://bucket/run --uploads --delete)";

}  // namespace

void add_gc(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<GcArguments>();
  CLI::App* command = app.add_subcommand("gc", "Finds and removes what killed writers left");
  command->footer(kGcExamples);
  command->add_option("target", options->target, "directory or URL")->required();
  command->add_flag("--uploads", options->uploads, "unfinished uploads of an object store");
  command->add_flag("--delete", options->remove, "remove what is listed");
  command->add_option("--older-than", options->older_than, "age, e.g. 90min, 12h, 7d; default: 24h")
      ->transform(CLI::AsNumberWithUnit(
          std::map<std::string, std::int64_t>{{"s", 1}, {"min", 60}, {"h", 3600}, {"d", 24 * 3600}},
          CLI::AsNumberWithUnit::UNIT_REQUIRED))
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("AGE");
  add_common(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return gc(*options, common); }; });
}

}  // namespace tessera::cli
