// tessera stats: what numbers the tensors hold.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/json_value.h"
#include "cli/output.h"
#include "tessera/stats.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

struct StatsArguments {
  std::string path;
  std::vector<std::string> only;
  bool suspect = false;
  bool finite = false;
  int threads = 2;
  OpenOptions open;
};

template <typename Number>
nlohmann::ordered_json json_or_null(const std::optional<Number>& number) {
  return number ? cli::json_of(Value(*number), 1) : nlohmann::ordered_json();
}

void print_document(const std::vector<TensorStats>& tensors) {
  JsonRows rows;
  for (const TensorStats& tensor : tensors) {
    nlohmann::ordered_json row;
    row["name"] = tensor.name;
    row["dtype"] = to_string(tensor.dtype);
    row["shape"] = tensor.shape;
    row["elements"] = tensor.elements;
    row["numbers"] = tensor.numbers;
    row["nan"] = tensor.nans;
    row["positive_infinity"] = tensor.positive_infinities;
    row["negative_infinity"] = tensor.negative_infinities;
    if (tensor.first_not_finite) row["first_not_finite"] = *tensor.first_not_finite;
    row["zeros"] = tensor.zeros;
    row["smallest"] = json_or_null(tensor.smallest);
    row["largest"] = json_or_null(tensor.largest);
    row["mean"] = json_or_null(tensor.mean);
    row["std"] = json_or_null(tensor.deviation);
    row["norm"] = json_or_null(tensor.norm);
    row["median_exponent"] = json_or_null(tensor.median_exponent);
    row["exponents"] = tensor.exponents;
    const Suspicion suspicion = tensor.suspicion();
    if (suspicion != Suspicion::none) row["suspect"] = to_string(suspicion);
    rows.add(row);
  }
  rows.end();
}

// Six digits of a real: who compares numbers takes --json.
template <typename Number>
std::string text_or_nothing(const std::optional<Number>& number) {
  if (!number) return "";
  const Value& value = *number;
  return value.is(Value::Kind::real) ? fmt::format("{:.6g}", value.as_real()) : render(value);
}

using StatsRow = std::array<std::string, 13>;

StatsRow row_of(const TensorStats& tensor) {
  const Suspicion suspicion = tensor.suspicion();
  return {printable_name(tensor.name),
          std::string(to_string(tensor.dtype)),
          to_string(tensor.shape),
          std::to_string(tensor.nans),
          std::to_string(tensor.positive_infinities),
          std::to_string(tensor.negative_infinities),
          std::to_string(tensor.zeros),
          text_or_nothing(tensor.smallest),
          text_or_nothing(tensor.largest),
          text_or_nothing(tensor.mean),
          text_or_nothing(tensor.deviation),
          text_or_nothing(tensor.norm),
          suspicion == Suspicion::none ? "" : "  " + std::string(to_string(suspicion))};
}

// Rows are made twice, for the columns' widths and to be printed, instead of kept.
void print_table(const std::vector<TensorStats>& tensors) {
  constexpr std::size_t kTexts = 3;  // columns whose texts begin at one place
  const StatsRow head{"name",     "dtype",   "shape", "nan", "+inf", "-inf", "zeros",
                      "smallest", "largest", "mean",  "std", "norm", ""};
  std::array<std::size_t, std::tuple_size_v<StatsRow>> widths{};
  const auto widen = [&](const StatsRow& row) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  };
  const auto print = [&](const StatsRow& row) {
    std::string line = fmt::format("{:<{}}", row[0], widths[0]);
    for (std::size_t i = 1; i + 1 < row.size(); ++i) {
      line += i < kTexts ? fmt::format("  {:<{}}", row[i], widths[i])
                         : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    fmt::print("{}{}\n", line, row.back());
  };
  widen(head);
  for (const TensorStats& tensor : tensors) widen(row_of(tensor));
  print(head);
  for (const TensorStats& tensor : tensors) print(row_of(tensor));
}

// A line for each tensor that is not finite, or that all are.
void print_not_finite(const std::vector<TensorStats>& tensors, std::size_t all) {
  for (const TensorStats& tensor : tensors) {
    fmt::print("{}  {} nan, {} +inf, {} -inf, first at {}\n", printable_name(tensor.name),
               tensor.nans, tensor.positive_infinities, tensor.negative_infinities,
               to_string(*tensor.first_not_finite));
  }
  if (tensors.empty()) fmt::print("finite: {}\n", counted(all, "tensor"));
}

void note_inner(const Checkpoint& checkpoint) {
  std::size_t inner = 0;
  for (const Leaf& leaf : checkpoint.leaves) inner += inner_tensors(leaf.value).size();
  if (inner > 0)
    print_notes({counted(inner, "tensor") + " inside of values (tuples, objects) left out"});
}

int stats(const StatsArguments& options, const Common& common) {
  Checkpoint checkpoint = opened(options.path, options.open);
  keep_only(checkpoint, options.only);
  std::vector<TensorStats> tensors;
  {
    ProgressBar bar("stats", common);
    tensors = stats_of(checkpoint, {.threads = options.threads, .progress = bar.hook()});
  }
  note_inner(checkpoint);
  const std::size_t all = tensors.size();
  if (options.finite) std::erase_if(tensors, [](const TensorStats& t) { return t.is_finite(); });
  if (options.suspect)
    std::erase_if(tensors, [](const TensorStats& t) { return t.suspicion() == Suspicion::none; });
  if (common.json) {
    print_document(tensors);
  } else if (options.finite) {
    print_not_finite(tensors, all);
  } else {
    print_table(tensors);
  }
  return options.finite && !tensors.empty() ? kNo : kDone;
}

constexpr const char* kStatsExamples = R"(
Reads every tensor once. NaN and infinities are counted and left out of the smallest and largest
number, the mean, the standard deviation (divided by the number of elements) and the L2 norm, which
are taken in float64: the same bits for any number of threads and pieces. A complex element counts
as two numbers, its real and its imaginary part; so do the two of float4_e2m1fn_x2. --json has the
exponents besides: how many numbers have a magnitude from 2^e to below 2^(e + 1), for e from -47
(and all below) to 16 (and all above).

--suspect shows what is empty, not finite, all zero, all the same, or has a median magnitude below
2^-50 or from 2^50 on (about 1e-15 and 1e15). With --finite the exit code is 1 if something is not
finite.

Examples:
  tessera stats checkpoint/ --only model
  tessera stats model.pt --suspect
  tessera stats run/step400 --finite --json)";

}  // namespace

void add_stats(CLI::App& app, Common& common, Action& action) {
  const auto options = std::make_shared<StatsArguments>();
  CLI::App* command = app.add_subcommand(
      "stats",
      "Counts and sums of the numbers in each tensor: NaN, Inf, zeros, range, mean, std, norm");
  command->footer(kStatsExamples);
  command->add_option("checkpoint", options->path, "file or directory")->required();
  add_only(*command, options->only);
  CLI::Option* const suspect =
      command->add_flag("--suspect", options->suspect, "show only tensors that are worth a look");
  command
      ->add_flag("--finite", options->finite,
                 "show only what is not finite; the exit code is 1 if there is something")
      ->excludes(suspect);
  add_threads(*command, options->threads);
  add_open(*command, options->open);
  add_common(*command, common);
  add_local_cache(*command, common);
  command->callback(
      [=, &common, &action] { action = [=, &common] { return stats(*options, common); }; });
}

}  // namespace tessera::cli
