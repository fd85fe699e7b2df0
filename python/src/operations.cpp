#include "operations.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "errors.h"
#include "jobs.h"
#include "options.h"
#include "reports.h"
#include "tensors.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "tessera/stats.h"
#include "tessera/verify.h"
#include "text.h"
#include "values.h"

namespace tessera::python {
namespace {

CheckpointKind target_kind(const std::string& name, const std::string& target) {
  if (!name.empty()) return kind_named(name);
  if (const auto kind = kind_of_target(target)) return *kind;
  throw Error(ErrorCode::invalid_argument,
              "the target's name does not say its kind: give `to`: dcp, torch, safetensors or "
              "olmo-...")
      .at_path(target);
}

ConvertOptions convert_options(const Options& given, const std::string& target) {
  ConvertOptions options;
  std::string to;
  given.get("to", to);
  options.to = target_kind(to, target);
  given.get("ranks", options.ranks);
  given.get("unit", options.olmo.unit);
  given.get("orig_params", options.olmo.orig_params);
  given.get("olmo_safetensors", options.olmo.safetensors);
  given.get("model_only", options.olmo.model_only);
  given.get("config", options.olmo.config);
  given.get("overwrite", options.overwrite);
  given.get("single_writer", options.single_writer);
  given.get("resume", options.resume);
  given.get("threads", options.threads);
  given.get("memory", options.memory);
  given.get("only", options.only);
  given.get("slice", options.slice);
  given.get("rename", options.rename);
  given.get("dtype", options.dtype);
  given.get("allow_wrap", options.allow_wrap);
  given.get("max_shard_size", options.max_shard_size);
  given.get("keep_duplicates", options.keep_duplicates);
  given.get("dequantize", options.dequantize);
  options.open = open_options(given);
  return options;
}

nb::dict dict_of(const ConvertReport& report) {
  nb::dict dict = python::dict_of(report.io);
  nb::list notes;
  for (const std::string& note : report.notes) notes.append(string_of(note));
  dict["target"] = string_of_path(report.target);
  dict["tensors"] = report.tensors;
  dict["values_in_metadata"] = report.values_in_metadata;
  dict["bytes_resumed"] = report.bytes_resumed;
  dict["notes"] = notes;
  return dict;
}

nb::dict convert(nb::handle source, nb::handle target, nb::dict given, nb::object progress) {
  const std::string from = place_of(source);
  const std::string to = place_of(target);
  ConvertOptions options = convert_options(Options(std::move(given)), to);
  return dict_of(run_job(std::move(progress), [&](Job& job) {
    options.progress = job.progress();
    options.stop = job.stop();
    return tessera::convert(from, to, options);
  }));
}

nb::dict convert_opened(const Opened& source, nb::handle target, nb::dict given,
                        nb::object progress) {
  const auto checkpoint = source.checkpoint();
  const std::string to = place_of(target);
  ConvertOptions options = convert_options(Options(std::move(given)), to);
  return dict_of(run_job(std::move(progress), [&](Job& job) {
    options.progress = job.progress();
    options.stop = job.stop();
    return tessera::convert(*checkpoint, to, options);
  }));
}

nb::dict verify(nb::handle given, bool read_data, int threads, nb::dict how, nb::object progress) {
  const std::string path = place_of(given);
  const OpenOptions open = open_options(Options(std::move(how)));
  const VerifyReport report = run_job(std::move(progress), [&](Job& job) {
    return tessera::verify(path, {.read_data = read_data,
                                  .open = open,
                                  .threads = threads,
                                  .progress = job.progress(),
                                  .stop = job.stop()});
  });
  nb::list findings;
  for (const Finding& finding : report.findings)
    findings.append(nb::make_tuple(string_of(to_string(finding.code)), string_of(finding.text)));
  nb::dict dict;
  dict["findings"] = findings;
  dict["tensors"] = report.tensors;
  dict["bytes"] = report.bytes;
  dict["bytes_unchecked"] = report.bytes_unchecked;
  nb::list files;
  for (const CheckedBytes& checked : report.files) {
    files.append(nb::make_tuple(string_of_path(checked.file), string_of(to_string(checked.by)),
                                checked.bytes));
  }
  dict["files"] = files;
  return dict;
}

std::vector<std::string> texts_of(const nb::list& strings) {
  std::vector<std::string> texts;
  for (const nb::handle string : strings) texts.push_back(text_of(string));
  return texts;
}

nb::list notes_of_left_keys(const nb::list& taken, const nb::list& left, int ranks) {
  nb::list notes;
  for (const std::string& note : notes_of_left_ranks(texts_of(taken), texts_of(left), ranks))
    notes.append(string_of(note));
  return notes;
}

nb::list diff(const Opened& a, const Opened& b, nb::object progress) {
  const auto left = a.checkpoint();
  const auto right = b.checkpoint();
  const std::vector<Difference> found = run_job(std::move(progress), [&](Job& job) {
    const ProgressHook hook = job.progress();
    return tessera::diff(*left, *right, [&](const Progress& now) {
      if (job.stop().stop_requested()) throw Error(ErrorCode::cancelled, "the caller asked for it");
      if (hook) hook(now);
    });
  });
  nb::list differences;
  for (const Difference& difference : found) {
    differences.append(nb::make_tuple(string_of(to_string(difference.kind)),
                                      string_of(difference.name), string_of(difference.text)));
  }
  return differences;
}

template <typename T>
nb::object number_or_none(const std::optional<T>& number) {
  return number ? object_of(Value(*number), nb::none()) : nb::none();
}

nb::dict dict_of(const TensorStats& stats) {
  nb::dict dict;
  dict["name"] = string_of(stats.name);
  dict["dtype"] = string_of(to_string(stats.dtype));
  dict["shape"] = nb::tuple(nb::cast(stats.shape));
  dict["elements"] = stats.elements;
  dict["numbers"] = stats.numbers;
  dict["nan"] = stats.nans;
  dict["positive_infinity"] = stats.positive_infinities;
  dict["negative_infinity"] = stats.negative_infinities;
  dict["first_not_finite"] = stats.first_not_finite
                                 ? nb::object(nb::tuple(nb::cast(*stats.first_not_finite)))
                                 : nb::none();
  dict["zeros"] = stats.zeros;
  dict["smallest"] = number_or_none(stats.smallest);
  dict["largest"] = number_or_none(stats.largest);
  dict["mean"] = number_or_none(stats.mean);
  dict["std"] = number_or_none(stats.deviation);
  dict["norm"] = number_or_none(stats.norm);
  dict["median_exponent"] = number_or_none(stats.median_exponent);
  dict["exponents"] =
      nb::cast(std::vector<std::uint64_t>(stats.exponents.begin(), stats.exponents.end()));
  const Suspicion suspicion = stats.suspicion();
  dict["suspect"] = suspicion == Suspicion::none ? nb::none() : string_of(to_string(suspicion));
  return dict;
}

nb::list stats(const Opened& of, int threads, nb::object progress) {
  const auto checkpoint = of.checkpoint();
  const std::vector<TensorStats> found = run_job(std::move(progress), [&](Job& job) {
    return stats_of(*checkpoint,
                    {.threads = threads, .progress = job.progress(), .stop = job.stop()});
  });
  nb::list tensors;
  for (const TensorStats& tensor : found) tensors.append(dict_of(tensor));
  return tensors;
}

nb::dict scan(nb::handle given, const std::vector<std::string>& allow) {
  const std::string path = place_of(given);
  const ScanReport report = run_job(nb::none(), [&](Job& job) {
    return tessera::scan(path, {.allow = allow, .stop = job.stop()});
  });
  nb::list names, problems;
  for (const ScannedName& name : report.names) {
    names.append(nb::make_tuple(string_of(name.name), string_of(to_string(name.kind)), name.pickles,
                                string_of_path(name.first), string_of(name.how)));
  }
  for (const tessera::Finding& problem : report.problems) problems.append(string_of(problem.text));
  nb::dict dict;
  dict["names"] = names;
  dict["pickles"] = report.pickles;
  dict["problems"] = problems;
  return dict;
}

nb::dict seal(nb::handle given, int threads, nb::dict how, nb::object progress) {
  const std::string path = place_of(given);
  const OpenOptions open = open_options(Options(std::move(how)));
  const SealReport report = run_job(std::move(progress), [&](Job& job) {
    return tessera::seal(
        path, {.open = open, .threads = threads, .progress = job.progress(), .stop = job.stop()});
  });
  nb::dict dict;
  dict["was_sealed"] = report.was_sealed;
  dict["side_file"] = path_or_none(report.side_file);
  dict["files"] = report.files;
  dict["bytes"] = report.bytes;
  return dict;
}

}  // namespace

void bind_operations(nb::module_& module) {
  module.def("is_optimizer_name", [](nb::handle name) { return is_optimizer_name(text_of(name)); });
  module.def("notes_of_left_ranks", notes_of_left_keys);
  module.def("convert", convert, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("convert_opened", convert_opened, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("verify", verify, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("diff", diff, nb::arg(), nb::arg(), nb::arg().none());
  module.def("stats", stats, nb::arg(), nb::arg(), nb::arg().none());
  module.def("scan", scan);
  module.def("seal", seal, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}

}  // namespace tessera::python
