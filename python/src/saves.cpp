#include "saves.h"

#include <memory>
#include <string>

#include "groups.h"
#include "jobs.h"
#include "options.h"
#include "reports.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "text.h"
#include "trees.h"

namespace tessera::python {
namespace {

IfDiffers if_differs(const Options& all, const char* name, IfDiffers otherwise) {
  std::string text;
  all.get(name, text);
  if (text.empty()) return otherwise;
  if (text == "refuse") return IfDiffers::refuse;
  if (text == "warn") return IfDiffers::warn;
  if (text == "keep") return IfDiffers::keep;
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + " is 'refuse', 'warn' or 'keep', and not '" + text + "'");
}

// `tree` was made by make_tree(). Its memory stays as it is until the call returns.
nb::dict save(const Tree& tree, nb::handle target, nb::dict given, nb::handle carrier,
              nb::object progress) {
  const std::string to = place_of(target);
  const Options all(std::move(given));
  SaveOptions options;
  std::string kind;
  all.get("kind", kind);
  if (!kind.empty()) options.kind = kind_named(kind);
  all.get("overwrite", options.overwrite);
  all.get("single_writer", options.single_writer);
  all.get("threads", options.threads);
  all.get("one_file_an_item", options.one_file_an_item);
  all.get("keep_duplicates", options.keep_duplicates);
  options.values = if_differs(all, "values", options.values);
  options.copies = if_differs(all, "copies", options.copies);
  all.get("same_optimizer", options.same_optimizer);
  const std::unique_ptr<Group> group = group_of(carrier);
  const SaveResult result = run_job(std::move(progress), [&](Job& job) {
    options.progress = job.progress();
    options.stop = job.stop();
    return tessera::save(tree.value, to, options, *group);
  });
  nb::dict dict = dict_of(result);
  dict["files"] = result.files;
  dict["total_bytes"] = result.total_bytes;
  dict["values_in_metadata"] = result.values_in_metadata;
  return dict;
}

}  // namespace

void bind_saves(nb::module_& module) {
  nb::class_<Tree>(module, "Tree");
  module.def("make_tree", tree_of, nb::arg().none(), nb::arg());
  module.def("save", save, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
}

}  // namespace tessera::python
