// tessera map: which file, and which rank, holds which piece.
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/dcp/read_catalog.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

constexpr int kWidth = 40;  // characters of a drawn tensor

struct MapArguments {
  std::string path;
  std::string name;
  OpenOptions open;
};

std::string file_of(const Piece& piece) {
  if (!piece.storage || !piece.storage->source) return "";
  return std::filesystem::path(piece.storage->source->name()).filename().string();
}

// The rank of the piece, or told by the name of its file, `__{rank}_...`; -1: not known.
int rank_of(const Piece& piece) {
  return piece.rank >= 0 ? piece.rank : rank_of_data_file(file_of(piece)).value_or(-1);
}

std::string owner_of(const Piece& piece) {
  const int rank = rank_of(piece);
  return rank >= 0 ? "rank " + std::to_string(rank) : file_of(piece);
}

// The place of a slice among all elements in row-major order, drawn: '#' where it has elements.
std::string drawn(const Slice& slice, const Shape& shape) {
  const auto total = static_cast<double>(std::max<std::int64_t>(1, numel(shape)));
  std::string line(kWidth, '.');
  const RunSequence runs(slice, shape);
  // More runs than characters cannot be told apart: a sample of them draws the same line.
  const std::int64_t step = std::max<std::int64_t>(1, runs.size() / (4 * kWidth));
  for (std::int64_t r = 0; r < runs.size(); r += step) {
    const Run run = runs[r];
    const auto begin = static_cast<int>(static_cast<double>(run.global) / total * kWidth);
    const auto end =
        static_cast<int>(static_cast<double>(run.global + run.count - 1) / total * kWidth);
    for (int i = begin; i <= std::min(end, kWidth - 1); ++i)
      line[static_cast<std::size_t>(i)] = '#';
  }
  return line;
}

nlohmann::ordered_json json_of(const Piece& piece, DType dtype) {
  nlohmann::ordered_json row;
  if (rank_of(piece) >= 0) row["rank"] = rank_of(piece);
  row["file"] = file_of(piece);
  if (piece.storage) row["offset"] = piece.storage->offset;
  row["bytes"] = static_cast<std::uint64_t>(numel(piece.slice)) * size_of(dtype);
  if (const Box* box = std::get_if<Box>(&piece.slice)) {
    row["offsets"] = box->offsets;
    row["sizes"] = box->sizes;
  } else {
    const auto& range = std::get<FlatRange>(piece.slice);
    row["range"] = {range.begin, range.end};
  }
  return row;
}

nlohmann::ordered_json json_of(const Leaf& leaf) {
  const Tensor& tensor = leaf.value.as_tensor();
  auto pieces = nlohmann::ordered_json::array();
  for (const Piece& piece : tensor.pieces) pieces.push_back(json_of(piece, tensor.dtype));
  return {{"name", leaf.name},
          {"dtype", to_string(tensor.dtype)},
          {"shape", tensor.shape},
          {"pieces", std::move(pieces)}};
}

void print_tensor(const Leaf& leaf) {
  const Tensor& tensor = leaf.value.as_tensor();
  fmt::print("{}  {} {}\n", printable_name(leaf.name), to_string(tensor.dtype),
             to_string(tensor.shape));
  for (const Piece& piece : tensor.pieces) {
    fmt::print("  {}  {}  {}  {}\n", drawn(piece.slice, tensor.shape), printable(owner_of(piece)),
               to_string(piece.slice), printable(file_of(piece)));
  }
}

// What a file has of all tensors: where a reader will spend its time.
struct FileUse {
  std::uint64_t pieces = 0;
  std::uint64_t bytes = 0;
};

std::map<std::string, FileUse> files_of(const std::vector<const Leaf*>& leaves) {
  std::map<std::string, FileUse> files;
  for (const Leaf* leaf : leaves) {
    const Tensor& tensor = leaf->value.as_tensor();
    for (const Piece& piece : tensor.pieces) {
      FileUse& use = files[file_of(piece)];
      ++use.pieces;
      use.bytes += static_cast<std::uint64_t>(numel(piece.slice)) * size_of(tensor.dtype);
    }
  }
  return files;
}

void print_files(const std::map<std::string, FileUse>& files) {
  std::uint64_t largest = 1;
  for (const auto& [name, use] : files) largest = std::max(largest, use.bytes);
  for (const auto& [name, use] : files) {
    const auto filled = static_cast<std::size_t>(static_cast<double>(use.bytes) /
                                                 static_cast<double>(largest) * kWidth);
    fmt::print("{:.<{}}  {}  {}  {}\n", std::string(filled, '#'), kWidth, human_bytes(use.bytes),
               counted(use.pieces, "piece"), printable(name));
  }
}

std::vector<const Leaf*> tensors_of(const Checkpoint& checkpoint) {
  std::vector<const Leaf*> leaves;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (leaf.value.is(Value::Kind::tensor)) leaves.push_back(&leaf);
  }
  return leaves;
}

int map(const MapArguments& options, const Common& common) {
  Checkpoint checkpoint = opened(options.path, options.open);
  if (!options.name.empty()) keep_only(checkpoint, {options.name});
  const std::vector<const Leaf*> leaves = tensors_of(checkpoint);
  if (leaves.empty() && !options.name.empty()) {
    throw Error(ErrorCode::not_found, "the checkpoint has no such tensor")
        .at_key(options.name)
        .at_path(checkpoint.path);
  }
  const auto files = options.name.empty() ? files_of(leaves) : std::map<std::string, FileUse>();
  if (common.json) {
    JsonRows rows;
    for (const Leaf* leaf : leaves) rows.add(json_of(*leaf));
    for (const auto& [name, use] : files)
      rows.add({{"file", name}, {"count", use.pieces}, {"bytes", use.bytes}});
    rows.end();
    return kDone;
  }
  for (const Leaf* leaf : leaves) print_tensor(*leaf);
  print_files(files);
  return kDone;
}

constexpr const char* kMapExamples = R"(
Prints one line per piece: where its elements lie in the tensor (left: first, right: last, in
row-major order), who wrote it, its offsets and sizes, and its file. Without a name, one line per
file follows.

Examples:
  tessera map checkpoint/
  tessera map checkpoint/ model.embed.weight --json)";

}  // namespace

void add_map(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<MapArguments>();
  CLI::App* command = app.add_subcommand("map", "Draws which rank and file holds which piece");
  command->footer(kMapExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  command->add_option("name", options->name, "tensors of this name only, as --only of ls");
  add_open(*command, options->open);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return map(*options, common); }; });
}

}  // namespace tessera::cli
