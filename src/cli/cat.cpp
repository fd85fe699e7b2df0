// tessera cat: the values of one tensor or object.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/npy.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/select.h"
#include "checkpoint/read/slices.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/error.h"
#include "tessera/numpy_array.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kMemory = 64 << 20;   // bytes of a tensor in memory at once, at most
constexpr std::size_t kMostValues = 1 << 20;  // of an object, as JSON

struct CatArguments {
  std::string path;
  std::string name;  // with or without [slices]
  std::string npy;   // a file to write instead of printing
  OpenOptions open;
};

// Prints elements in row-major order, a line a row of the last dimension.
class Printer {
 public:
  Printer(const Box& box, DType dtype) : dtype_(dtype) {
    if (!box.sizes.empty()) row_ = std::max<std::int64_t>(1, box.sizes.back());
  }

  void add(ByteView bytes) {
    std::string text;
    const std::size_t element = size_of(dtype_);
    for (std::size_t at = 0; at < bytes.size(); at += element) {
      text += element_text(dtype_, bytes.data() + at);
      text += ++column_ == row_ ? '\n' : ' ';
      if (column_ == row_) column_ = 0;
    }
    fmt::print("{}", text);
  }

 private:
  DType dtype_;
  std::int64_t row_ = 1;
  std::int64_t column_ = 0;
};

void read_box(const Leaf& leaf, const Box& box, const std::function<void(ByteView)>& take) {
  const Tensor& tensor = leaf.value.as_tensor();
  TensorReader reader(tensor, leaf.name);
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t count = numel(box.sizes);
  const Buffers buffers = buffers_for(kMemory, 1, request_cost_of(tensor));
  const auto step = static_cast<std::int64_t>(buffers.window) / element;
  std::vector<std::byte> window(static_cast<std::size_t>(std::min(step, count) * element));
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t part = std::min(step, count - begin);
    reader.read(box, begin, part, window.data());
    take(ByteView(window).first(static_cast<std::size_t>(part * element)));
  }
}

const Leaf* leaf_named(const Checkpoint& checkpoint, const std::string& name) {
  const auto printed = printed_name(name);
  const Leaf* leaf = printed ? checkpoint.find(*printed) : nullptr;
  return leaf != nullptr ? leaf : checkpoint.find(name);
}

// "w[0]" can be a name of its own: then it is not a slice of "w".
const Leaf& leaf_of(const Checkpoint& checkpoint, const std::string& name, std::string& slices) {
  const Leaf* leaf = leaf_named(checkpoint, name);
  const std::size_t open = name.rfind('[');
  if (leaf == nullptr && name.ends_with(']') && open != std::string::npos) {
    slices = name.substr(open);
    leaf = leaf_named(checkpoint, name.substr(0, open));
  }
  if (leaf != nullptr) return *leaf;
  const auto below = std::ranges::count_if(
      checkpoint.leaves,
      [start = name + "."](const Leaf& other) { return other.name.starts_with(start); });
  if (below == 0) refuse_key(name, checkpoint.leaves, checkpoint.path);
  throw Error(ErrorCode::invalid_argument,
              "the name is not one tensor or value but the beginning of " + std::to_string(below) +
                  ": ls --only lists them")
      .at_key(printable(name))
      .at_path(checkpoint.path);
}

void print_elements(const Leaf& leaf, const Box& box) {
  const DType dtype = leaf.value.as_tensor().dtype;
  auto values = nlohmann::ordered_json::array();
  read_box(leaf, box, [&](ByteView bytes) {
    for (std::size_t at = 0; at < bytes.size(); at += size_of(dtype)) {
      values.push_back(element_json(dtype, bytes.data() + at));
    }
  });
  nlohmann::ordered_json json;
  json["name"] = leaf.name;
  json["dtype"] = to_string(dtype);
  json["shape"] = box.sizes;
  json["values"] = std::move(values);
  print_json(json, -1);
}

void cat_value(const Leaf& leaf, bool as_json) {
  if (!as_json) return fmt::print("{}\n", render(leaf.value, 1 << 20));
  nlohmann::ordered_json json;
  json["name"] = leaf.name;
  add_value(leaf.value, kMostValues, json);
  print_json(json, -1);
}

// To a new file, or as "-" to standard output.
void write_npy(const Leaf& leaf, const Box& box, const std::string& path) {
  const DType dtype = leaf.value.as_tensor().dtype;
  const auto write_to = [&](const NpyWriter::Write& write) {
    NpyWriter npy(write, dtype, box.sizes);
    read_box(leaf, box, [&npy](ByteView bytes) { npy.add(bytes); });
  };
  if (path == "-") {
    return write_to([](ByteView bytes) { std::fwrite(bytes.data(), 1, bytes.size(), stdout); });
  }
  const std::filesystem::path file(path);
  const auto sink =
      open_store(file.parent_path().string())->create(file.filename().string(), IfExists::fail);
  std::uint64_t at = 0;
  write_to([&](ByteView bytes) {
    sink->write_at(at, bytes);
    at += bytes.size();
  });
  sink->commit();
}

void cat_tensor(const Leaf& leaf, const Box& box, const CatArguments& options,
                const Common& common) {
  const Tensor& tensor = leaf.value.as_tensor();
  if (!options.npy.empty()) {
    write_npy(leaf, box, options.npy);
  } else if (common.json) {
    print_elements(leaf, box);
  } else {
    Printer printer(box, tensor.dtype);
    read_box(leaf, box, [&printer](ByteView bytes) { printer.add(bytes); });
  }
}

// An array of numpy as the tensor of its elements; any other leaf as it is.
Leaf with_elements(const Leaf& leaf) {
  auto array = numpy_array(leaf.value);
  if (!array || array->is_scalar) return leaf;
  Leaf made = leaf;
  made.value = Value(std::move(array->tensor));
  return made;
}

int cat(const CatArguments& options, const Common& common) {
  const Checkpoint checkpoint = opened(options.path, options.open);
  std::string slices;
  const Leaf& leaf = leaf_of(checkpoint, options.name, slices);
  if (is_missing_value(leaf.value)) require_here(leaf);
  const Leaf elements = with_elements(leaf);
  if (elements.value.is(Value::Kind::tensor)) {
    try {
      cat_tensor(elements, box_of(slices, elements.value.as_tensor().shape, Outside::cut), options,
                 common);
    } catch (Error& error) {
      if (error.key().empty()) error.at_key(leaf.name);
      throw;
    }
    return kDone;
  }
  if (!slices.empty() || !options.npy.empty()) {
    throw Error(ErrorCode::invalid_argument, "slices and --npy work on tensors and arrays only")
        .at_key(leaf.name);
  }
  cat_value(leaf, common.json);
  return kDone;
}

constexpr const char* kCatExamples = R"(
Prints one line per row of the last dimension, of an array of numpy as of a tensor. Slices are
Python's, without steps; a single index keeps its dimension. Only the bytes of the slice are read.
Types that neither C++ nor numpy has (8-bit floats) are printed as bytes, and written to .npy as
unsigned integers; .npy has bfloat16 as float32. Complex numbers are printed as 1+2j. With --json,
booleans, numbers and text have JSON's types; inf, nan and complex numbers are strings, because JSON
has no word for them.

Examples:
  tessera cat checkpoint/ model.norm.weight
  tessera cat checkpoint/ 'model.embed.weight[0:2,:3]'
  tessera cat model.pt optim.param_groups.0.lr
  tessera cat model.safetensors w --npy w.npy)";

}  // namespace

void add_cat(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<CatArguments>();
  CLI::App* command = app.add_subcommand("cat", "Prints the values of one tensor or object");
  command->footer(kCatExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  command->add_option("name", options->name, "as ls prints it; [slices] may follow")->required();
  command->add_option("--npy", options->npy,
                      "write a .npy file instead, which must not exist; - is standard output");
  add_open(*command, options->open);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return cat(*options, common); }; });
}

}  // namespace tessera::cli
