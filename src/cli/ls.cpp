// tessera ls: one line a leaf.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMostValues = 1000;  // of an object, as JSON

struct Options {
  std::string path;
  std::vector<std::string> only;
};

struct Row {
  std::string name, dtype, shape, bytes, pieces, files;
};

std::size_t file_count(const Tensor& tensor) {
  std::unordered_set<const ByteSource*> sources;
  for (const Piece& piece : tensor.pieces) {
    if (piece.storage && piece.storage->source) sources.insert(piece.storage->source.get());
  }
  std::set<std::string_view> files;
  for (const ByteSource* source : sources) files.insert(source->name());
  return files.size();
}

Row row_of(const Leaf& leaf) {
  if (!leaf.value.is(Value::Kind::tensor)) {
    return {printable(leaf.name),
            std::string(describe(leaf.value.kind())),
            render(leaf.value, 60),
            "",
            "",
            ""};
  }
  const Tensor& tensor = leaf.value.as_tensor();
  return {printable(leaf.name),
          std::string(to_string(tensor.dtype)),
          to_string(tensor.shape),
          std::to_string(byte_size(tensor.dtype, tensor.shape)),
          std::to_string(tensor.pieces.size()),
          std::to_string(file_count(tensor))};
}

void print_leaves(const std::vector<const Leaf*>& leaves) {
  auto list = nlohmann::ordered_json::array();
  for (const Leaf* leaf : leaves) {
    nlohmann::ordered_json item;
    item["name"] = leaf->name;
    if (leaf->value.is(Value::Kind::tensor)) {
      const Tensor& tensor = leaf->value.as_tensor();
      item["dtype"] = to_string(tensor.dtype);
      item["shape"] = tensor.shape;
      item["bytes"] = byte_size(tensor.dtype, tensor.shape);
      item["pieces"] = tensor.pieces.size();
      item["files"] = file_count(tensor);
    } else {
      item["value"] = json_of(leaf->value, kMostValues);
    }
    list.push_back(std::move(item));
  }
  print_json(list);
}

void print_table(const std::vector<const Leaf*>& leaves) {
  std::vector<Row> rows = {{"name", "dtype", "shape", "bytes", "pieces", "files"}};
  for (const Leaf* leaf : leaves) rows.push_back(row_of(*leaf));
  std::size_t name = 0, dtype = 0, shape = 0, bytes = 0;
  for (const Row& row : rows) {
    name = std::max(name, row.name.size());
    dtype = std::max(dtype, row.dtype.size());
    shape = std::max(shape, row.shape.size());
    bytes = std::max(bytes, row.bytes.size());
  }
  for (const Row& row : rows) {
    fmt::print("{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:>6}  {:>5}\n", row.name, name, row.dtype, dtype,
               row.shape, shape, row.bytes, bytes, row.pieces, row.files);
  }
}

int ls(const Options& options, const Common& common) {
  // Lives as long as the process: to free a million pieces takes longer than to list them.
  static Checkpoint& checkpoint = *new Checkpoint(Checkpoint::open(options.path));
  keep_only(checkpoint, options.only);
  std::vector<const Leaf*> leaves;
  for (const Leaf& leaf : checkpoint.leaves) leaves.push_back(&leaf);
  common.json ? print_leaves(leaves) : print_table(leaves);
  return kDone;
}

constexpr const char* kExamples = R"(
Examples:
  tessera ls checkpoint/
  tessera ls model.pt --only 'layers.0.*' --json)";

}  // namespace

void add_ls(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("ls", "Lists the tensors: name, dtype, shape, bytes, pieces, files");
  command->footer(kExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  add_only(*command, options->only);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return ls(*options, common); }; });
}

}  // namespace tessera::cli
