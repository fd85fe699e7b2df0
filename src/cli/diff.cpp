// tessera diff: two checkpoints of any kinds, by name.
#include <array>
#include <bitset>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/read/select.h"
#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/verify.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct DiffArguments {
  std::string a;
  std::string b;
  std::vector<std::string> only;
  OpenOptions open;
};

// The state dicts alone are read of modules that torch.save pickled whole, with all that is in
// them, with a warning for each.
bool leaves_out_modules(const Checkpoint& checkpoint, const OpenOptions& how) {
  return checkpoint.kind == CheckpointKind::torch_file && !how.raw && !checkpoint.warnings.empty();
}

void print_document(const std::vector<Difference>& differences) {
  auto list = nlohmann::ordered_json::array();
  for (const Difference& difference : differences) {
    nlohmann::ordered_json row{
        {"kind", to_string(difference.kind)}, {"name", difference.name}, {"text", difference.text}};
    if (const auto& elements = difference.elements) {
      row["different"] = elements->different;
      row["elements"] = elements->all;
      row["first"] = elements->first;
      if (elements->largest) row["largest_difference"] = json_of(*elements->largest, 1);
    }
    if (const auto& rows = difference.rows) {
      row["common_rows"] = rows->common;
      row["different"] = rows->different;
      row["rest_is_zero"] = rows->is_zero_behind;
    }
    list.push_back(std::move(row));
  }
  print_json(list);
}

void print_lines(const std::vector<Difference>& differences) {
  for (const Difference& difference : differences) {
    fmt::print("{:<8} {}  {}\n", to_string(difference.kind), printable_name(difference.name),
               printable(difference.text));
  }
}

// What one of them lacks is a difference. What both lack is a slip.
void keep_only_of_both(Checkpoint& a, Checkpoint& b, const std::vector<std::string>& only) {
  Selection of_a = select_what_is_there(a.leaves, only);
  Selection of_b = select_what_is_there(b.leaves, only);
  const std::set<std::string> lacking(of_b.unmatched.begin(), of_b.unmatched.end());
  for (const std::string& key : of_a.unmatched) {
    if (lacking.contains(key)) (void)select(a.leaves, {key}, a.path);  // throws
  }
  print_notes(of_a.notes.empty() ? of_b.notes : of_a.notes);
  a.leaves = std::move(of_a.leaves);
  b.leaves = std::move(of_b.leaves);
}

// The options that a kind of checkpoint may have no use for. One of two checkpoints has to.
constexpr std::array kForSomeKinds{
    +[](OpenOptions& options) { options.part = false; },
    +[](OpenOptions& options) { options.rank.reset(); },
    +[](OpenOptions& options) { options.accept.clear(); },
    +[](OpenOptions& options) { options.ignore_index = false; },
    +[](OpenOptions& options) { options.header_limit = OpenOptions().header_limit; }};
using OptionSet = std::bitset<kForSomeKinds.size()>;

struct OpenedSide {
  Checkpoint checkpoint;
  OptionSet left_out;                 // of those that are given: what this one has no use for
  std::optional<Error> refusal = {};  // in the words of the first try
};

OpenOptions without(const OptionSet& left_out, OpenOptions options) {
  for (std::size_t i = 0; i < kForSomeKinds.size(); ++i) {
    if (left_out[i]) kForSomeKinds.at(i)(options);
  }
  return options;
}

// With as many of the options as it has a use for.
OpenedSide open_side(const std::string& path, const OpenOptions& options) {
  std::optional<Error> refusal;
  constexpr auto kSets = 1U << kForSomeKinds.size();
  for (std::size_t most = 0; most <= kForSomeKinds.size(); ++most) {
    for (unsigned set = 0; set < kSets; ++set) {
      const OptionSet left_out(set);
      if (left_out.count() != most) continue;
      try {
        return {opened(path, without(left_out, options)), left_out, refusal};
      } catch (const Error& error) {
        if (error.code() != ErrorCode::invalid_argument) throw;
        if (!refusal) refusal = error;
      }
    }
  }
  throw Error(*refusal);
}

int diff(const DiffArguments& options, const Common& common) {
  OpenedSide side_a = open_side(options.a, options.open);
  OpenedSide side_b = open_side(options.b, options.open);
  if ((side_a.left_out & side_b.left_out).any()) throw Error(*side_b.refusal);
  Checkpoint& a = side_a.checkpoint;
  Checkpoint& b = side_b.checkpoint;
  if (!options.only.empty()) keep_only_of_both(a, b, options.only);
  std::vector<Difference> differences;
  {
    ProgressBar bar("diff", common);
    differences = tessera::diff(a, b, bar.hook());
  }
  if (common.json) {
    print_document(differences);
  } else if (differences.empty()) {
    const bool is_part = leaves_out_modules(a, options.open) && leaves_out_modules(b, options.open);
    fmt::print(
        "equal: {} {}, bit for bit{}\n", a.leaves.size(), a.leaves.size() == 1 ? "leaf" : "leaves",
        is_part ? "; of whole modules their state dicts alone, --raw compares the rest" : "");
  } else {
    print_lines(differences);
  }
  return differences.empty() ? kDone : kNo;
}

constexpr const char* kDiffExamples = R"(
Kinds may differ; tensors are compared bit for bit. Of two that differ in the first dimension alone
the rows that both have are compared, and whether the rest is zero: convert --slice takes a part.
An option for files of one kind holds for the one of the two that is such a file. The exit code is 1
if there is a difference.

Examples:
  tessera diff checkpoint/ model.safetensors
  tessera diff step100/ step200/ --only model --json)";

}  // namespace

void add_diff(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<DiffArguments>();
  CLI::App* command = app.add_subcommand(
      "diff", "Compares two checkpoints by name: missing, extra, shape, dtype, values");
  command->footer(kDiffExamples);
  add_only(*command, options->only);
  add_open(*command, options->open);
  command->add_option("a", options->a, "file or directory")->required();
  command->add_option("b", options->b, "file or directory")->required();
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return diff(*options, common); }; });
}

}  // namespace tessera::cli
