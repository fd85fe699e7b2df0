// tessera stat: what a checkpoint is, in a few lines.
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/open/directory.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/select.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct Facts {
  std::uint64_t tensors = 0;
  std::uint64_t inner_tensors = 0;  // inside of values
  std::uint64_t values = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::uint64_t file_bytes = 0;
  bool optimizer = false;
};

// The elements of the model, without the optimizer, the trainer and generators of random numbers.
std::uint64_t parameters_of(const Checkpoint& checkpoint) {
  std::uint64_t elements = 0;
  for (const Leaf& leaf : select_what_is_there(checkpoint.leaves, {"model"}).leaves) {
    if (!leaf.value.is(Value::Kind::tensor) || leaf.name.starts_with("train.")) continue;
    elements += static_cast<std::uint64_t>(numel(leaf.value.as_tensor().shape));
  }
  return elements;
}

Facts facts_of(const Checkpoint& checkpoint) {
  Facts facts;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (is_missing_value(leaf.value)) continue;  // nobody knows what it is
    facts.optimizer = facts.optimizer || is_optimizer_state(leaf);
    if (!leaf.value.is(Value::Kind::tensor)) {
      ++facts.values;
      facts.inner_tensors += inner_tensors(leaf.value).size();
      continue;
    }
    const Tensor& tensor = leaf.value.as_tensor();
    ++facts.tensors;
    facts.inner_tensors += inner_tensors(leaf.value).size();
    facts.bytes += byte_size(tensor.dtype, tensor.shape);
  }
  facts.elements = parameters_of(checkpoint);
  for (const ObjectInfo& file : checkpoint.files) facts.file_bytes += file.size;
  return facts;
}

nlohmann::ordered_json json_of_files(const std::vector<FileRow>& files) {
  auto rows = nlohmann::ordered_json::array();
  for (const FileRow& row : files) {
    rows.push_back({{"file", row.name},
                    {"state", to_string(row.state)},
                    {"bytes", row.size},
                    {"reason", row.reason}});
  }
  return rows;
}

void print_document(const Checkpoint& checkpoint, const Facts& facts) {
  nlohmann::ordered_json json;
  json["kind"] = to_string(checkpoint.kind);
  json["producer"] = checkpoint.producer;
  json["save_id"] = checkpoint.save_id;
  // DCP does not say how many ranks there were, only which of them wrote.
  const bool is_dcp = checkpoint.kind == CheckpointKind::dcp;
  json["world_size"] =
      is_dcp ? nlohmann::ordered_json() : nlohmann::ordered_json(checkpoint.world_size);
  json["writers"] = checkpoint.world_size;
  json["parameters"] = facts.elements;
  json["tensors"] = facts.tensors;
  json["inner_tensors"] = facts.inner_tensors;
  json["values"] = facts.values;
  json["tensor_bytes"] = facts.bytes;
  json["files"] = checkpoint.files.size();
  json["file_bytes"] = facts.file_bytes;
  json["optimizer"] = facts.optimizer;
  json["complete"] = !lacks_files(checkpoint);
  json["metadata"] = checkpoint.metadata;
  json["warnings"] = checkpoint.warnings;
  json["directory"] = json_of_files(checkpoint.directory());
  print_json(json);
}

void print_lines(const Checkpoint& checkpoint, const Facts& facts) {
  fmt::print("kind        {}\n", to_string(checkpoint.kind));
  if (!checkpoint.producer.empty()) fmt::print("producer    {}\n", printable(checkpoint.producer));
  if (!checkpoint.save_id.empty()) fmt::print("save id     {}\n", printable(checkpoint.save_id));
  if (checkpoint.world_size > 0) {
    fmt::print("{}{}\n", checkpoint.kind == CheckpointKind::dcp ? "writers     " : "world size  ",
               checkpoint.world_size);
  }
  fmt::print("parameters  {}\n", facts.elements);
  fmt::print("tensors     {}{} ({})\n", facts.tensors, and_inner(facts.inner_tensors),
             human_bytes(facts.bytes));
  fmt::print("values      {}\n", facts.values);
  fmt::print("files       {} ({})\n", checkpoint.files.size(), human_bytes(facts.file_bytes));
  fmt::print("optimizer   {}\n", facts.optimizer ? "yes" : "no");
  for (const auto& [key, value] : checkpoint.metadata)
    fmt::print("metadata    {}: {}\n", printable(key, 200), printable(value, 200));
  fmt::print("complete    {}\n", lacks_files(checkpoint)
                                     ? "no: files are missing"
                                     : "yes: every tensor is covered once, every file is there");
  for (const FileRow& row : checkpoint.directory()) {
    if (row.state == FileState::used && row.reason.empty()) continue;
    fmt::print("{:<10}  {}{}\n", "file",
               printable(row.name, 200) + ": " + std::string(to_string(row.state)),
               row.reason.empty() ? "" : ", " + printable(row.reason));
  }
}

struct StatArguments {
  std::string path;
  OpenOptions open;
};

int stat(const StatArguments& options, const Common& common) {
  const Checkpoint checkpoint = opened(options.path, options.open);
  const Facts facts = facts_of(checkpoint);
  common.json ? print_document(checkpoint, facts) : print_lines(checkpoint, facts);
  return kDone;
}

constexpr const char* kStatExamples = R"(
Opens the checkpoint and reads none of its tensors. DCP does not record how many ranks saved it; the
writers are those that have files.

Examples:
  tessera stat checkpoint/
  tessera stat s3://bucket/run/step1000 --json)";

}  // namespace

void add_stat(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<StatArguments>();
  CLI::App* command = app.add_subcommand(
      "stat", "Prints kind, producer, world size, parameters, bytes, completeness");
  command->footer(kStatExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  add_open(*command, options->open);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return stat(*options, common); }; });
}

}  // namespace tessera::cli
