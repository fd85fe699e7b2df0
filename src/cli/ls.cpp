// tessera ls: one line a leaf.
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/open/directory.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/read/missing.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "storage/arena/arenas.h"
#include "tessera/numpy_array.h"
#include "value/known.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMostListed = 1000;  // of an object, as JSON

struct LsArguments {
  std::string path;
  std::vector<std::string> only;
  OpenOptions open;
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

// What a value is: "a list", "datetime.date", "numpy float64".
std::string kind_text(const Value& value) {
  if (const auto known = known_value(value)) return std::string(known->type);
  return std::string(describe(value.kind()));
}

Row facts_of_value(const Leaf& leaf) {
  const std::string name = printable_name(leaf.name);
  if (is_missing_value(leaf.value)) return {name, "?", "", "", "", ""};
  const auto array = numpy_array(leaf.value);
  if (!array) return {name, kind_text(leaf.value), render(leaf.value, 60), "", "", ""};
  const Tensor& tensor = array->tensor;
  return {name,
          "numpy " + std::string(to_string(tensor.dtype)),
          array->is_scalar ? render(leaf.value, 60) : to_string(tensor.shape),
          array->is_scalar ? "" : std::to_string(byte_size(tensor.dtype, tensor.shape)),
          "",
          ""};
}

// All but the last two, which need work.
Row facts_of(const Leaf& leaf) {
  if (!leaf.value.is(Value::Kind::tensor)) return facts_of_value(leaf);
  const Tensor& tensor = leaf.value.as_tensor();
  return {printable_name(leaf.name),
          std::string(to_string(tensor.dtype)),
          to_string(tensor.shape),
          std::to_string(byte_size(tensor.dtype, tensor.shape)),
          "",
          ""};
}

// "  missing: a, b"; empty: all is there. Names of files in the directory.
std::string missing_text(const Leaf& leaf, const std::string& directory) {
  std::string names;
  for (const std::string& file : missing_files(leaf.value, directory))
    names += (names.empty() ? "" : ", ") + printable(file, 200);
  return names.empty() ? "" : "  missing: " + names;
}

Row row_of(const Leaf& leaf) {
  Row row = facts_of(leaf);
  if (!leaf.value.is(Value::Kind::tensor)) return row;
  const Tensor& tensor = leaf.value.as_tensor();
  row.pieces = std::to_string(tensor.pieces.size());
  row.files = std::to_string(file_count(tensor));
  return row;
}

// Tensors that are others under another name.
class Ties {
 public:
  explicit Ties(const std::vector<Leaf>& leaves) : leaves_(leaves), kept_(ties_of(leaves)) {}

  // The name that the elements have first; null: its own.
  [[nodiscard]] const std::string* name_for(std::size_t leaf) const {
    return kept_[leaf] == leaf ? nullptr : &leaves_[kept_[leaf]].name;
  }

 private:
  const std::vector<Leaf>& leaves_;
  std::vector<std::size_t> kept_;
};

void print_leaves(const Checkpoint& checkpoint) {
  const std::vector<Leaf>& leaves = checkpoint.leaves;
  const bool is_lacking = lacks_files(checkpoint);
  JsonRows rows;
  const Ties ties(leaves);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const Leaf& leaf = leaves[i];
    nlohmann::ordered_json item;
    item["name"] = leaf.name;
    if (leaf.value.is(Value::Kind::tensor)) {
      const Tensor& tensor = leaf.value.as_tensor();
      item["dtype"] = to_string(tensor.dtype);
      item["shape"] = tensor.shape;
      item["bytes"] = byte_size(tensor.dtype, tensor.shape);
      item["pieces"] = tensor.pieces.size();
      item["files"] = file_count(tensor);
      if (const std::string* const name = ties.name_for(i)) item["tied_to"] = *name;
    } else if (!is_missing_value(leaf.value)) {
      add_value(leaf.value, kMostListed, item);
    }
    if (is_lacking) item["missing"] = missing_files(leaf.value, checkpoint.store->name());
    rows.add(item);
  }
  rows.end();
}

// Rows are made twice, for the columns' widths and to be printed, instead of kept: there may be
// more of them than fit into memory.
void print_table(const Checkpoint& checkpoint) {
  const std::vector<Leaf>& leaves = checkpoint.leaves;
  const bool is_lacking = lacks_files(checkpoint);
  const Row head{"name", "dtype", "shape", "bytes", "pieces", "files"};
  std::size_t name = 0, dtype = 0, shape = 0, bytes = 0;
  const auto widen = [&](const Row& row) {
    name = std::max(name, row.name.size());
    dtype = std::max(dtype, row.dtype.size());
    shape = std::max(shape, row.shape.size());
    bytes = std::max(bytes, row.bytes.size());
  };
  const auto print = [&](const Row& row, const std::string& more) {
    fmt::print("{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:>6}  {:>5}{}\n", row.name, name, row.dtype, dtype,
               row.shape, shape, row.bytes, bytes, row.pieces, row.files, more);
  };
  widen(head);
  for (const Leaf& leaf : leaves) widen(facts_of(leaf));
  print(head, "");
  const Ties ties(leaves);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::string* const tied = ties.name_for(i);
    const std::string tie = tied == nullptr ? "" : "  tied to " + printable_name(*tied);
    print(row_of(leaves[i]),
          is_lacking ? tie + missing_text(leaves[i], checkpoint.store->name()) : tie);
  }
}

// What writer processes of this user keep in memory, a row for each save.
struct KeptRow {
  KeptPart first;
  std::set<int> ranks;  // whose parts are here, and are not being written over
  std::uint64_t bytes = 0;
  bool has_trainer = false;
};

std::vector<KeptRow> kept_rows() {
  std::map<std::string, KeptRow> rows;
  for (const KeptPart& part : kept_parts()) {
    KeptRow& row = rows[save_place(part)];
    if (row.first.place.empty()) row.first = part;
    row.has_trainer = row.has_trainer || has_trainer(part);
    if (part.objects.empty() || !row.ranks.insert(part.rank).second) continue;
    for (const KeptObject& object : part.objects) row.bytes += object.bytes;
  }
  std::vector<KeptRow> found;
  for (auto& [place, row] : rows) found.push_back(std::move(row));
  return found;
}

int ls_arenas(bool as_json) {
  constexpr double kSecond = 1e9;
  JsonRows json;
  const auto rows = kept_rows();
  for (const KeptRow& row : rows) {
    const std::string url = "arena://" + row.first.place;
    const auto age = static_cast<double>(host_time() - row.first.made) / kSecond;
    if (as_json) {
      nlohmann::ordered_json item;
      item["checkpoint"] = url;
      item["ranks"] = row.first.size;
      item["ranks_here"] = row.ranks.size();
      item["bytes"] = row.bytes;
      item["seconds"] = age;
      item["trainer_runs"] = row.has_trainer;
      json.add(item);
    } else {
      fmt::print("{}  {} of {} ranks, {}, {:.0f} s old, {}\n", printable_name(url),
                 row.ranks.size(), row.first.size, human_bytes(row.bytes), age,
                 row.has_trainer ? "its trainer runs" : "its trainer has ended");
    }
  }
  if (as_json) json.end();
  if (!as_json && rows.empty()) fmt::print("no writer process keeps a snapshot in memory\n");
  return kDone;
}

int ls(const LsArguments& options, const Common& common) {
  if (options.path == "arena://") return ls_arenas(common.json);
  // Lives as long as the process: to free a million pieces takes longer than to list them.
  static Checkpoint& checkpoint = *new Checkpoint(opened(options.path, options.open));
  keep_only(checkpoint, options.only);
  common.json ? print_leaves(checkpoint) : print_table(checkpoint);
  return kDone;
}

constexpr const char* kLsExamples = R"(
A tensor that is another one under a second name (tied weights, views of one storage) says so behind
its row.

Examples:
  tessera ls checkpoint/
  tessera ls arena://          what writer processes of this user keep in memory
  tessera ls model.pt --only 'layers.0.*' --json)";

}  // namespace

void add_ls(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<LsArguments>();
  CLI::App* command =
      app.add_subcommand("ls", "Lists the tensors: name, dtype, shape, bytes, pieces, files");
  command->footer(kLsExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  add_only(*command, options->only);
  add_open(*command, options->open);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return ls(*options, common); }; });
}

}  // namespace tessera::cli
